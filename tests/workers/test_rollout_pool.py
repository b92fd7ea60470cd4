"""The pool of engines on processes that are none: who gets what, weights, starts and sleep."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from grpo_dist.engines.base import EngineLoad, Footprint
from grpo_dist.engines.settings import EngineSettings, GroupAddress, SamplingSettings
from grpo_dist.errors import (
    AgentError,
    ConfigError,
    EngineError,
    GrpoDistError,
    WeightSyncError,
    WorkerError,
    WorkerLost,
)
from grpo_dist.runtime.batch_ref import Label
from grpo_dist.runtime.event_loop import TimeLimits, run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.runtime.process import Address
from grpo_dist.workers.rollout import Engine, GroupRequest, RolloutGroup
from grpo_dist.workers.scorer import Task
from grpo_dist.workers.weight_transport import BroadcastTransport, ObjectStoreTransport, Outcomes, weight_transport
from tests.messages import refuses, says
from tests.runtime.fakes import FakeNodes, Fakes, Held, settle
from tests.worker_settings import changed, engine_settings

pytestmark = pytest.mark.usefixtures("impatient")
SAMPLING = SamplingSettings(4, 1.0, 1.0, -1, 8, None)


# --- groups ------------------------------
def held(size: int, most: int = 0) -> tuple[RolloutGroup, Held]:
    workers = Held("rollout", size)
    return RolloutGroup(workers, RestartBudget(most, FakeNodes())), workers


def ask(group: RolloutGroup, uid: object, prompt: int | None = None, **options: Any) -> asyncio.Task[Any]:
    """By default each has a prompt of its own."""
    token_ids = np.frombuffer(f"{uid}".encode(), np.int8) if prompt is None else np.array([prompt], np.int32)
    return asyncio.create_task(group.generate(GroupRequest(f"{uid}", token_ids, SAMPLING, Task("", "", {})), **options))


async def ranks_of(group: RolloutGroup, *asked: tuple[Any, ...]) -> list[int]:
    """To whom these groups go, one after the other."""
    before = len(group.workers.asked)
    for each in asked:
        ask(group, *each)
    await asyncio.sleep(0)
    return [rank for method, rank in group.workers.order[before:] if method == "generate"]


async def answer(workers: Held, method: str = "generate", **loads: EngineLoad) -> None:
    """All open calls are answered: a label, the load of the engine "rank0", "rank1", and no failures."""
    for rank, answered in workers.open(method):
        load = loads.get(f"rank{rank}", EngineLoad())
        answered.set_result((Label((), {}, 0), load, []) if method == "generate" else None)
    await settle()


class Bringing:
    """Brings weights of a version to engines, and notes to whom; some refuse them."""

    def __init__(self, version: int, **refused: GrpoDistError) -> None:
        self.version, self.refused = version, refused
        self.to: list[list[int]] = []

    async def __call__(self, ranks: Sequence[int]) -> Outcomes:
        self.to.append(list(ranks))
        return {rank: self.refused.get(f"rank{rank}", self.version) for rank in ranks}


async def test_groups_are_spread_evenly_and_a_prompt_comes_back_to_its_prefix_until_new_weights_come() -> None:
    group, _ = held(2)
    ranks = await ranks_of(group, *((i,) for i in range(10)))
    assert [ranks.count(rank) for rank in (0, 1)] == [5, 5]

    group, _ = held(2)
    first, second, *others = await ranks_of(group, ("a", 0), ("b", 1), *((i, 1) for i in range(3)))
    assert sorted((first, second)) == [0, 1]
    assert others == [second] * 3
    await group.take_weights(Bringing(1), 1)
    assert await ranks_of(group, ("later", 1)) == [first], "the least loaded"


async def test_an_engine_in_which_many_wait_leaves_later_groups_to_the_other() -> None:
    """Its memory is full with 4 sequences, so that with 32 waiting (an eighth of 256) it has all it may have."""
    group, workers = held(2)
    assert sorted(await ranks_of(group, ("a",), ("b",))) == [0, 1]
    await answer(workers, rank0=EngineLoad(4, 200))
    ranks = await ranks_of(group, *((i,) for i in range(54)))
    assert (ranks.count(0), ranks.count(1)) == (6, 48), "in proportion to the limits: 36 and 288 sequences"
    await answer(workers, rank0=EngineLoad(36, 0))
    ranks = await ranks_of(group, *((f"later {i}",) for i in range(54)))
    assert ranks.count(0) > 6, "it takes more when none waits"


@pytest.mark.parametrize(
    ("limit", "load", "expected"),
    [
        (64, (64, 0), 68),  # none waits: more
        (70, (64, 0), 72),  # up to an upper bound
        (64, (64, 8), 64),  # some wait, as they should
        (64, (20, 44), 28),  # memory is full: what runs, and an eighth of what could
    ],
)
def test_the_number_in_flight_follows_the_engines_load(limit: int, load: tuple[int, int], expected: int) -> None:
    member = Engine(max_num_seqs=64, limit=limit)
    member.adapt(*load, group_size=4)
    assert member.limit == expected


@pytest.mark.parametrize("error", [EngineError("vLLM failed"), WorkerError("no answer", "rollout", 0), None])
async def test_an_engine_that_fails_or_hangs_is_replaced(error: GrpoDistError | None) -> None:
    group, workers = held(1, most=1)
    workers.limits = TimeLimits(60.0, {} if error else {"generate": 0.02})
    asked = ask(group, "a")
    await settle()
    if error is not None:
        workers.open("generate")[0][1].set_exception(error)
    workers.limits = TimeLimits(60.0)  # the new process may take longer
    while not workers.open("start"):
        await asyncio.sleep(0)
    assert workers.lives == [1]
    (failure,) = group.restarts.failures
    if error is None:
        says(failure, "rollout worker 0", "'generate'", "0.02 s")
    else:
        assert failure == str(error)
    await answer(workers, "start")
    await answer(workers)
    assert len(await asked) == 0


async def test_a_mistake_of_the_users_and_too_few_episodes_are_no_fault_of_the_engine() -> None:
    group, workers = held(1, most=3)
    failures = [AgentError("one"), AgentError("two", "timeout", was_last=True)]
    failed: list[AgentError] = []
    mistake, too_few = ask(group, "a"), ask(group, "b", on_failed=failed.extend)
    await settle()
    (_, first), (_, second) = workers.open("generate")
    first.set_exception(ConfigError("vLLM: temperature=10"))
    second.set_result((None, EngineLoad(), failures))
    with refuses(ConfigError, "temperature=10"):
        await mistake
    with pytest.raises(AgentError) as caught:
        await too_few
    assert caught.value is failed[1]
    assert [(error.kind, error.was_last) for error in failed] == [("error", False), ("timeout", True)]
    assert (workers.lives, group.restarts.failures) == ([0], [])


@pytest.mark.parametrize(
    "end",
    [
        (None, EngineLoad(), []),
        (Label((), {}, 0), EngineLoad(), []),
        WorkerLost("its process died", "rollout", 0),
        ConfigError("vLLM refuses the settings"),
    ],
    ids=["aborted", "finished before the abort came", "worker lost", "refused"],
)
async def test_nothing_is_kept_of_a_group_that_was_to_be_aborted_however_it_ends(end: Any) -> None:
    """What is kept of a call would pin its responses in the object store."""
    group, workers = held(1)
    asked = ask(group, "a group")
    await settle()
    asked.cancel()
    await settle()
    assert workers.asked[-1] == ("abort", 0, ["a group"])
    assert len(group._aborted) == 1
    (_, answered), (task,) = workers.open("generate")[0], group._tasks
    answered.set_exception(end) if isinstance(end, GrpoDistError) else answered.set_result(end)
    await asyncio.gather(task, return_exceptions=True)
    assert not group._aborted


async def test_an_engine_that_comes_back_during_an_update_waits_for_the_next_weights() -> None:
    """The actor no longer holds those that the others have."""
    group, workers = held(1, most=1)
    await group.take_weights(Bringing(1), 1)
    await group.begin_update()
    asked = ask(group, "during the update")
    await settle()
    workers.open("generate")[0][1].set_exception(WorkerLost("its process died", "rollout", 0))
    await settle()
    await answer(workers, "start")
    await group.started()
    assert [member.load for member in group.members] == [math.inf]
    assert not workers.open("generate")
    brings = Bringing(2)
    await group.take_weights(brings, 2)
    await settle()
    assert (brings.to, len(workers.open("generate"))) == ([[0]], 1)
    await answer(workers)
    await asked


async def test_an_engine_that_dies_in_a_sync_does_not_hold_up_the_others() -> None:
    group, workers = held(2, most=1)
    brings = Bringing(6, rank0=WorkerLost("its process died", "rollout", 0))
    await group.take_weights(brings, 6)
    assert await ranks_of(group, ("now",), ("soon",)) == [1, 1]
    brings.refused.clear()
    await settle()
    await answer(workers, "start")
    assert (brings.to, workers.lives, len(group.restarts.failures)) == ([[0, 1], [0]], [1, 0], 1)
    assert await ranks_of(group, ("later",)) == [0]


# --- weights ------------------------------
def test_transports_by_name() -> None:
    of = {"workers_per_engine": 2, "collective_timeout_s": 600.0}
    assert isinstance(weight_transport("object_store", **of), ObjectStoreTransport)
    ipc, broadcast = weight_transport("ipc", **of), weight_transport("broadcast", **of)
    assert type(ipc) is type(broadcast) is BroadcastTransport
    assert (ipc.backend, broadcast.backend, broadcast.workers_per_engine) == ("ipc", "broadcast", 2)
    actor = WorkerGroup("actor", [], TimeLimits(1000.0, {"sync_weights": 9.0}))
    assert broadcast.rank_timeout_s(actor) == 4.5, "sooner than the driver gives up"
    actor = WorkerGroup("actor", [], TimeLimits(1000.0))
    assert broadcast.rank_timeout_s(actor) == 300.0, "sooner than other ranks of the actor"


def exporting() -> Fakes:
    return Fakes("actor", 2, export_weights={0: ["a bucket", "another"], 1: []})


def test_every_engine_loads_rank_0s_buckets_once_all_ranks_have_exported() -> None:
    actor, engines = exporting(), Fakes("rollout", 2, load_weights={0: 4, 1: 4})
    engines.asked = actor.asked  # one list of both
    run(RolloutGroup(engines).sync_weights(actor, ObjectStoreTransport(), version=4, dtype="float32"))
    loads = [("load_weights", rank, ["a bucket", "another"], 4) for rank in range(2)]
    assert actor.asked == [*(("export_weights", rank, "float32") for rank in range(2)), *loads]

    actor.asked.clear()
    actor.results["export_weights"][1] = actor.error(1, "sync_weights", "RuntimeError: gather failed")
    with refuses(WorkerError, "actor worker 1", "'sync_weights'", "RuntimeError: gather failed"):
        run(RolloutGroup(engines).sync_weights(actor, ObjectStoreTransport(), version=5, dtype="float32"))
    assert [method for method, _ in actor.order] == ["export_weights"] * 2, "no engine is touched"


@pytest.mark.parametrize("held", [3, -1, "4"])
def test_an_engine_that_confirms_another_version_stops_the_run(held: object) -> None:
    group, engines = made(2, most=3, load_weights={0: 4, 1: held})
    sync = group.sync_weights(exporting(), ObjectStoreTransport(), version=4, dtype="float32")
    with refuses(GrpoDistError, "rollout worker 1", f"version {held}", "sync of 4"):
        run(sync)
    damaged = WeightSyncError("weight bucket 0 is damaged")
    with refuses(WeightSyncError, "bucket 0", "damaged"):
        run(group.take_weights(Bringing(5, rank0=damaged), 5))
    assert (group.restarts.failures, engines.lives) == ([], [0, 0])


def formed(rollout: WorkerGroup) -> BroadcastTransport:
    """A transport whose group these engines are."""
    transport = BroadcastTransport(1, 300.0)
    transport._members = list(rollout.handles)
    return transport


def test_nothing_is_sent_while_an_engines_responses_end() -> None:
    actor, engines = Fakes("actor", 2), Fakes("rollout", 2, receive_weights={0: 3, 1: 3})
    engines.asked = actor.asked
    assert run(formed(engines).sync(actor, engines, [0, 1], version=3, dtype="float32")) == {0: 3, 1: 3}
    steps = ("pause_for_weights", "broadcast_weights", "receive_weights")
    assert actor.order == [(step, rank) for step in steps for rank in (0, 1)]


def test_with_ipc_every_actor_rank_joins_before_the_engines_and_all_learn_where() -> None:
    """On GPUs that roles share each rank has engines beside it. Two engines of two workers, on two machines."""
    host = {"open_weight_store": {0: ("10.0.0.1", 77)}}
    here, there = (Address("host", ip, 1, "node") for ip in ("10.0.0.1", "10.0.0.2"))
    actor, engines = Fakes("actor", 3, **host), Fakes("rollout", 2, address={0: here, 1: there})
    actor.note_addresses([here, here, there])
    engines.asked = actor.asked
    assert run(BroadcastTransport(2, 300.0, "ipc")._form(actor, engines, [0, 1], engines.handles)) == {}
    address = GroupAddress("10.0.0.1", 77, 1, 7, 30.0, "ipc", 3)  # half of what the driver waits
    assert actor.asked == [
        *(("address", rank) for rank in range(2)),
        ("open_weight_store", 0, ["10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2"]),
        *(("join_weight_group", rank, address) for rank in range(3)),
        *(("join_weight_group", rank, address, first) for rank, first in enumerate((3, 5))),
    ]


def test_an_engine_that_dies_before_it_has_paused_is_not_sent_to() -> None:
    lost = WorkerLost("its process died", "rollout", 0, "node", "sync_weights")
    actor, engines = Fakes("actor", 1), Fakes("rollout", 2, pause_for_weights={0: lost})
    found = run(formed(engines)._attempt(actor, engines, [0, 1], 3, "float32"))
    assert found[0] is lost
    assert isinstance(found[1], WeightSyncError), "it gets a second attempt"
    assert not actor.asked


def test_an_actor_rank_that_is_lost_is_named_and_not_the_one_whose_connection_broke() -> None:
    broken = WorkerError("RuntimeError: Connection closed by peer", "actor", 0, "node", "sync_weights")
    actor, engines = Fakes("actor", 2, broadcast_weights={0: broken}), Fakes("rollout", 1)
    actor.states = {1: "gone"}
    with refuses(WorkerLost, "actor worker 1", "'sync_weights'", "gone"):
        run(formed(engines).sync(actor, engines, [0], version=3, dtype="float32"))


# --- starts and sleep ------------------------------
def made(
    size: int, *, absent: Sequence[int] = (), extra: bool = False, most: int = 1, **results: Any
) -> tuple[RolloutGroup, Fakes]:
    """Engines of which some have no process yet, because they are not required (`extra`) or have no room."""
    workers, there = Fakes("rollout", size, **results), FakeNodes()
    for rank in absent:
        workers.handles[rank] = None
        workers.bundles[rank] = replace(workers.bundles[rank], required=not extra)
        there.full |= set() if extra else {workers.bundles[rank]}
    return RolloutGroup(workers, RestartBudget(most, there)), workers


def started(*settings: EngineSettings, **results: Any) -> tuple[RolloutGroup, Fakes]:
    group, workers = made(len(settings), **results)
    run(group.start(settings))
    workers.asked.clear()
    return group, workers


async def until_ready(group: RolloutGroup, rank: int) -> None:
    while not group.members[rank].is_ready:
        await asyncio.sleep(0)


AWAKE = engine_settings()
SLEEPS = engine_settings(free_cache_engine=True, shares_gpu=True)


def test_an_engine_that_is_replaced_takes_what_the_one_before_took() -> None:
    """And does not let vLLM measure what is free while other roles are at work. Without GPUs nothing is noted."""
    died, plain = EngineError("vLLM failed"), changed(SLEEPS, kv_cache_memory_gib=None)
    group, workers = started(plain, plain, sleep={1: died})
    group.note_started([None, Footprint(total_gib=27.5, kv_cache_gib=20.25)])
    run(group.begin_update())
    (start,) = [asked for asked in workers.asked if asked[0] == "start"]
    assert start == ("start", 1, changed(plain, footprint_gib=27.5, kv_cache_memory_gib=20.25))
    assert group.restarts.failures == ["vLLM failed"]
    restarted = [("sleep", 0), ("sleep", 1), ("respawn", 1), ("start", 1), ("sleep", 1)]
    assert workers.order == restarted, "it starts and sleeps before the update has the memory"
    workers.asked.clear()
    workers.results = {"sleep": {0: died}}
    with pytest.raises(EngineError) as caught:
        run(group.begin_update())
    assert caught.value is died
    assert workers.order == [("sleep", 0), ("sleep", 1)], "the budget is spent"


def test_engines_sleep_if_they_are_to_and_one_that_is_starting_starts_first() -> None:
    group, workers = started(AWAKE, SLEEPS, AWAKE)
    run(group.begin_update())
    assert workers.order == [("sleep", 1)]
    group, workers = started(SLEEPS, SLEEPS)

    async def replace_and_sleep() -> None:
        group.replace(1, workers.handles[1], EngineError("it died while it sampled"))
        await group.begin_update()

    run(replace_and_sleep())
    assert workers.order == [("respawn", 1), ("start", 1), ("sleep", 0), ("sleep", 1)]
    assert not group.is_starting(1)


async def test_an_engine_whose_machine_comes_later_gets_the_weights_in_force() -> None:
    (group, workers), brings = made(2, absent=[1]), Bringing(5)
    assert await group.start([SLEEPS, SLEEPS]) == [None, None]
    await group.take_weights(brings, 5)
    await group.begin_update()
    await group.take_weights(brings, 5)
    assert ([member.is_ready for member in group.members], brings.to) == ([True, False], [[0], [0]])
    assert workers.order == [("start", 0), ("wake", 0), ("sleep", 0), ("wake", 0)]
    group.restarts.nodes.full.clear()
    await until_ready(group, 1)
    assert workers.order[4:] == [("respawn", 1), ("start", 1), ("wake", 1)]
    assert brings.to[2:] == [[1]]


async def test_an_engine_that_has_room_before_the_first_sync_gets_weights_by_itself() -> None:
    (group, _), brings = made(3, absent=[2], extra=True, most=0), Bringing(7)
    await group.start([AWAKE] * 3)
    while group.is_starting(2):
        await asyncio.sleep(0)
    assert not group.members[2].is_ready, "it has the weights of the model's folder"
    await group.take_weights(brings, 7)
    await until_ready(group, 2)
    await group.take_weights(brings, 7)
    assert brings.to == [[0, 1], [2], [0, 1, 2]]


async def test_an_engine_that_starts_during_the_first_sync_gets_the_weights_after_it() -> None:
    (group, workers), brings = made(2), Bringing(3)
    await group.start([AWAKE] * 2)
    group.replace(1, workers.handles[1], EngineError("it died before the first sync"))
    await group.take_weights(brings, 3)
    await until_ready(group, 1)
    assert brings.to == [[0], [1]]


async def test_weights_are_gone_where_the_last_engine_is_lost_during_an_update_and_come_back() -> None:
    (group, workers), brings = made(1), Bringing(3)
    await group.start([AWAKE])
    await group.take_weights(brings, 3)
    await group.begin_update()
    assert not group.weights_gone.is_set(), "the engine has them"
    group.replace(0, workers.handles[0], EngineError("it died during the update"))
    assert group.weights_gone.is_set()
    await group.started()
    await group.take_weights(brings, 3)
    assert not group.weights_gone.is_set()


async def test_an_engine_that_no_weights_reach_is_left_out() -> None:
    group, workers = made(3, absent=[1, 2], extra=True, most=0)
    there, brings = group.restarts.nodes, Bringing(4, rank2=WeightSyncError("the weight group was not formed"))
    await group.start([AWAKE] * 3)
    await group.take_weights(brings, 4)
    await until_ready(group, 1)
    while not there.left:
        await asyncio.sleep(0)
    await group.take_weights(brings, 4)
    assert sorted(brings.to[:3]) == [[0], [1], [2]]
    assert brings.to[3:] == [[0, 1]]
    assert (there.left, group.restarts.failures, workers.present) == ([workers.bundles[2]], [], [0, 1])
