"""Rollout workers that die, hang and fail: what they were asked for comes back, and others take their place."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import ray

from grpo_dist.engines.base import EngineLoad, Footprint
from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from grpo_dist.errors import ConfigError, EngineError, GrpoDistError, WeightSyncError, WorkerError
from grpo_dist.workers import rollout_group
from grpo_dist.workers.batch_ref import Label
from grpo_dist.workers.group import Call, finished
from grpo_dist.workers.limits import TimeLimits
from grpo_dist.workers.process import Process
from grpo_dist.workers.restarts import RestartBudget
from grpo_dist.workers.rollout_group import Member, RolloutGroup
from grpo_dist.workers.weight_transport import Outcomes, outcomes
from tests.processes import spawned
from tests.workers.test_weight_transport import Scripted, engine_settings

pytestmark = pytest.mark.ray

SAMPLING = SamplingSettings(4, 1.0, 1.0, -1, 8, None)
PROMPT = np.array([1], np.int32)


class Worker(Process):
    """Answers with its process id and the weights it holds; a prompt's name says what happens to it."""

    version, load = -1, EngineLoad()

    async def start(self, settings: object) -> None: ...

    async def generate(
        self, uid: str, prompt: np.ndarray, sampling: SamplingSettings, task: object
    ) -> tuple[tuple[Label, EngineLoad], np.ndarray]:
        if uid.startswith("slow"):
            await asyncio.sleep(1.0)
        if uid.startswith("hang"):
            await asyncio.sleep(1000)
        if uid == "engine fails":
            raise EngineError("vLLM failed: EngineDeadError: engine died")
        if uid == "user's mistake":
            raise ConfigError("vLLM refuses the sampling settings")
        label = Label(("pid",), {"uid": uid, "pid": os.getpid(), "version": self.version}, 1)
        return (label, self.load), np.full(100_000, os.getpid())

    async def load_weights(self, buckets: list, version: int) -> int:
        if buckets == ["damaged"]:
            raise WeightSyncError("weight bucket 0 is damaged")
        if buckets == ["deadly for 0"] and self.version == 5:
            os._exit(1)
        self.version = version if buckets != ["ignored"] else 99
        return self.version

    async def set_version(self, version: int) -> None:
        self.version = version

    async def set_load(self, running: int, waiting: int) -> None:
        self.load = EngineLoad(running, waiting)

    async def die(self) -> None:
        os._exit(1)

    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def make(local_ray: None) -> Iterator[Callable[..., RolloutGroup]]:
    with contextlib.ExitStack() as processes:

        def make(size: int = 2, *, most: int = 0, **options: float) -> RolloutGroup:
            workers = processes.enter_context(spawned("rollout", Worker, [()] * size))
            group = RolloutGroup(workers, RestartBudget(most), **options)
            workers.gather(group.submit_start([None] * size))
            return group

        yield make


def sync(group: RolloutGroup, buckets: list, version: int) -> None:
    def bring(ranks: Sequence[int]) -> Outcomes:
        return outcomes({rank: group.workers.submit(rank, "sync", "load_weights", buckets, version) for rank in ranks})

    group.take_weights(bring, version)


def collect_all(group: RolloutGroup, uids: list[str]) -> list:
    """Ask for all groups, and again for those that were lost, until each is there."""
    queue, asked, found = list(uids), {}, []
    while queue or group.in_flight:
        group.catch_up()
        while queue and group.has_room:
            uid = queue.pop()
            asked[group.submit(uid, np.frombuffer(uid.encode(), np.int8), SAMPLING)] = uid
        answers = [group.collect(call) for call in finished(group.in_flight, None)]
        found += [answer for answer in answers if answer is not None]
        group.check_deadlines()
        queue += [asked[call].removeprefix("hang ") for call in group.take_lost()]
    return found


def test_groups_are_spread_evenly(make: Callable[..., RolloutGroup]) -> None:
    group = make()
    calls = [group.submit(f"slow {i}", np.array([i], np.int32), SAMPLING) for i in range(10)]
    assert [sum(call.rank == rank for call in calls) for rank in (0, 1)] == [5, 5]
    assert len(group.in_flight) == 10


def test_a_prompt_comes_back_to_the_engine_that_has_its_prefix_until_new_weights_come(make: Callable) -> None:
    group = make()
    first, other = (group.submit(uid, np.array([i], np.int32), SAMPLING) for i, uid in enumerate(("slow a", "slow b")))
    assert {first.rank, other.rank} == {0, 1}
    again = [group.submit("slow again", np.array([1], np.int32), SAMPLING).rank for _ in range(3)]
    assert again == [other.rank] * 3
    sync(group, ["good"], 1)
    assert group.submit("slow later", np.array([1], np.int32), SAMPLING).rank == first.rank, "the least loaded"


def test_what_a_dead_worker_was_asked_for_is_lost_and_the_worker_comes_back(make: Callable) -> None:
    group = make(most=1)
    sync(group, ["good"], 5)
    before = group.workers.call_all("pid", "pid")
    uids = [f"slow {i}" if i % 2 else f"hang {i}" for i in range(6)]  # none of the first worker's is answered before
    calls = [group.submit(uid, np.array([i], np.int32), SAMPLING) for i, uid in enumerate(uids)]
    group.workers.tell(0, "die")
    answers, lost = [], []
    while group.in_flight:
        for call in finished(group.in_flight, None):
            answer = group.collect(call)
            answers += [answer] if answer is not None else []
        lost += group.take_lost()
    assert sorted(answer.small["uid"] for answer in answers) == ["slow 1", "slow 3", "slow 5"], "the other worker's"
    assert lost == [call for call in calls if call.rank == 0]
    assert len(group.restarts.failures) == 1
    assert "rollout worker 0" in group.restarts.failures[0]
    after = group.workers.call_all("pid", "pid")
    assert (after[0] != before[0], after[1]) == (True, before[1])
    versions = {answer.small["version"] for answer in collect_all(group, [f"{i}" for i in range(6)])}
    assert versions == {5}, "the new process has the weights in force"


def test_what_a_worker_has_answered_outlives_it(make: Callable) -> None:
    group = make(1, most=1)
    (answer,) = collect_all(group, ["answered"])
    group.workers.kill()
    (block,) = answer.frames[0].blocks
    assert (ray.get(block, timeout=30) == answer.small["pid"]).all()


def test_an_engine_that_fails_is_replaced_and_one_that_fails_too_often_stops_the_run(make: Callable) -> None:
    group = make(1, most=1)
    for expected in (0, 1):
        call = group.submit("engine fails", PROMPT, SAMPLING)
        while not finished([call], None):
            pass
        assert len(group.restarts.failures) == expected
        if expected == 0:
            assert (group.collect(call), group.take_lost()) == (None, [call])
            assert collect_all(group, []) == []
    with pytest.raises(EngineError, match="engine died") as caught:
        group.collect(call)
    assert caught.value.__notes__ == ["trainer.max_worker_restarts=1 workers were replaced before"]


def test_a_mistake_of_the_users_is_not_tried_again(make: Callable) -> None:
    group = make(1, most=3)
    call = group.submit("user's mistake", PROMPT, SAMPLING)
    while not finished([call], None):
        pass
    with pytest.raises(ConfigError, match="refuses the sampling settings"):
        group.collect(call)
    assert len(group.restarts.failures) == 0


def test_a_worker_that_hangs_is_replaced(make: Callable) -> None:
    group = make(1, most=1)
    group.workers.limits = TimeLimits(240.0, {"generate": 0.5})
    lost: list = []
    group.submit("hang", PROMPT, SAMPLING)
    while not lost:
        group.check_deadlines()
        lost = group.take_lost()
        time.sleep(0.05)
    group.workers.limits = TimeLimits(240.0)  # the new process may need longer to start
    answers = collect_all(group, ["once"])
    assert [answer.small["uid"] for answer in answers] == ["once"]
    assert "no answer within 0.5 s" in group.restarts.failures[0]


def test_a_worker_that_dies_in_a_sync_does_not_hold_up_the_others(make: Callable) -> None:
    group = make(most=1)
    sync(group, ["good"], 4)
    group.workers.call(0, "test", "set_version", 5)
    started = time.monotonic()
    sync(group, ["deadly for 0"], 6)
    assert time.monotonic() - started < 60
    assert len(group.restarts.failures) == 1
    assert group.submit("now", PROMPT, SAMPLING).rank == 1, "the one that lives goes on at once"
    answers, round_ = [], 0
    while not answers or group.workers.call(0, "test", "pid") not in {answer.small["pid"] for answer in answers}:
        round_ += 1
        answers += collect_all(group, [f"slow {round_} {i}" for i in range(6)])
    assert {answer.small["version"] for answer in answers} == {6}, "the new process too"


def test_damaged_weights_and_other_versions_are_errors(make: Callable) -> None:
    group = make(1, most=3)
    with pytest.raises(WeightSyncError, match="is damaged"):
        sync(group, ["damaged"], 1)
    with pytest.raises(GrpoDistError, match="rollout worker 0 holds weight version 99 after the sync of 2"):
        sync(group, ["ignored"], 2)
    assert len(group.restarts.failures) == 0


def test_without_a_budget_the_first_failure_stops_the_run(make: Callable) -> None:
    group = make(1)
    call = group.submit("hang", PROMPT, SAMPLING)
    group.workers.tell(0, "die")
    while not finished([call], None):
        pass
    with pytest.raises(WorkerError, match="its process died"):
        group.collect(call)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ((64, 0), 68),  # none waits: more
        ((64, 8), 64),  # some wait, as they should
        ((20, 44), 28),  # memory is full: what runs, and an eighth of what could
    ],
)
def test_the_number_in_flight_follows_the_engines_load(load: tuple[int, int], expected: int) -> None:
    member = Member(max_num_seqs=64, limit=64)
    member.adapt(*load, group_size=4)
    assert member.limit == expected


def test_an_engine_in_which_many_wait_leaves_later_groups_to_the_other(make: Callable[..., RolloutGroup]) -> None:
    """Its memory is full with 4 sequences, so that with 32 waiting (an eighth of 256) it has all it may have."""
    group = make()
    group.workers.call(0, "test", "set_load", 4, 200)
    assert len(collect_all(group, ["a", "b"])) == 2
    calls = [group.submit(f"slow {i}", np.array([i], np.int32), SAMPLING) for i in range(54)]
    ranks = [call.rank for call in calls]
    assert (ranks.count(0), ranks.count(1)) == (6, 48), "in proportion to the limits: 36 and 288 sequences"
    group.workers.call(0, "test", "set_load", 36, 0)
    while group.in_flight:
        for call in finished(group.in_flight, None):
            group.collect(call)
    ranks = [group.submit(f"{i}", np.array([i], np.int8), SAMPLING).rank for i in range(54)]
    assert ranks.count(0) > 6, "it takes more when none waits"


def test_the_number_in_flight_has_an_upper_bound() -> None:
    member = Member(max_num_seqs=64, limit=70)
    member.adapt(64, 0, group_size=4)
    assert member.limit == 72


class Engines(Scripted):
    """Engines that are none, and that can be replaced."""

    def call_home(self) -> list:
        return []

    def respawn(self, rank: int) -> None:
        self.handles[rank] = object()
        self.asked.append(("respawn", rank))
        self.answers.get("sleep", {}).pop(rank, None)  # the new process sleeps as it should

    def resolve(self, call: Call) -> object:
        return self.settle([call])[0]


def engines_of(*settings: EngineSettings, **answers: object) -> tuple[RolloutGroup, Engines]:
    workers = Engines("rollout", len(settings), **answers)
    group = RolloutGroup(workers, RestartBudget(1))
    group.submit_start(settings)
    workers.asked.clear()
    workers.told.clear()
    return group, workers


@pytest.fixture
def starts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start has ended whenever it is waited for."""
    monkeypatch.setattr(rollout_group, "finished", lambda calls, background: calls)


def test_an_engine_that_is_replaced_takes_what_the_one_before_took(starts_end: None) -> None:
    """And does not let vLLM measure what is free while other roles are at work. Without GPUs nothing is noted."""
    died = EngineError("vLLM failed")
    plain = dataclasses.replace(engine_settings("model", 0), kv_cache_memory_gib=None, free_cache_engine=True)
    group, workers = engines_of(plain, plain, sleep={1: died})
    group.note_started([None, Footprint(total_gib=27.5, kv_cache_gib=20.25)])
    group.free_memory()
    (start,) = [told for told in workers.told if told[0] == "start"]
    assert start == ("start", 1, dataclasses.replace(plain, footprint_gib=27.5, kv_cache_memory_gib=20.25))
    assert group.restarts.failures == ["vLLM failed"]
    assert workers.asked == [("sleep", 0), ("sleep", 1), ("respawn", 1), ("start", 1), ("sleep", 1)], (
        "it starts and sleeps before the update has the memory"
    )
    workers.asked.clear()
    workers.answers = {"sleep": {0: died}}
    with pytest.raises(EngineError, match="vLLM failed"):
        group.free_memory()
    assert workers.asked == [("sleep", 0), ("sleep", 1)], "the budget is spent"


def test_an_engine_that_is_starting_when_others_sleep_starts_first(starts_end: None) -> None:
    settings = dataclasses.replace(engine_settings("model", 0), free_cache_engine=True)
    group, workers = engines_of(settings, settings)
    group._replace(1, EngineError("it died while it sampled"))
    group.free_memory()
    assert workers.asked == [("respawn", 1), ("start", 1), ("sleep", 0), ("sleep", 1)]
    assert group._members[1].starting is None


def test_engines_sleep_if_they_are_to() -> None:
    awake = engine_settings("model", 0)
    group, workers = engines_of(awake, dataclasses.replace(awake, free_cache_engine=True), awake)
    group.free_memory()
    assert workers.asked == [("sleep", 1)]
