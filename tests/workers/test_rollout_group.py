"""Rollout workers that die, hang and fail: others answer what they were asked for, and take their place."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import ray
import torch

from grpo_dist.engines.base import EngineLoad
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import (
    AgentError,
    ConfigError,
    EngineError,
    GrpoDistError,
    WeightSyncError,
    WorkerError,
)
from grpo_dist.protocol import DataProto
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.event_loop import TimeLimits, run
from grpo_dist.runtime.mailbox import Mailbox
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.runtime.process import Process
from grpo_dist.workers.rollout import Engine, GroupRequest, RolloutGroup
from grpo_dist.workers.scorer import Task
from grpo_dist.workers.weight_transport import Outcomes, outcomes
from tests.messages import refuses, says
from tests.processes import spawned

pytestmark = pytest.mark.ray

SAMPLING = SamplingSettings(4, 1.0, 1.0, -1, 8, None)


class Worker(Mailbox, Process):
    """Answers with its process id and the weights it holds; a prompt's name says what happens to it."""

    version, load, hangs = -1, EngineLoad(), False

    async def start(self, settings: object) -> None: ...

    async def generate(
        self, uid: str, prompt: np.ndarray, sampling: SamplingSettings, task: object
    ) -> tuple[tuple[Label | None, EngineLoad, list[AgentError]], DataProto | None]:
        if uid.startswith("slow"):
            await asyncio.sleep(1.0)
        if self.hangs:
            await asyncio.sleep(1000)
        if uid == "engine fails":
            raise EngineError("vLLM failed: EngineDeadError: engine died")
        if uid == "user's mistake":
            raise ConfigError("vLLM: temperature=10")
        if uid == "too few are left":
            return (None, self.load, [AgentError("one"), AgentError("two", "timeout", was_last=True)]), None
        label = Label(("pid",), {"uid": uid, "pid": os.getpid(), "version": self.version}, 1)
        return (label, self.load, []), DataProto.from_dict({"pid": torch.full((1, 100_000), os.getpid())})

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

    async def hang_from_now_on(self) -> None:
        self.hangs = True

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
            run(group.start([None] * size))
            return group

        yield make


def sync(group: RolloutGroup, buckets: list, version: int) -> None:
    async def bring(ranks: Sequence[int]) -> Outcomes:
        calls = {rank: group.workers.submit(rank, "sync", "load_weights", buckets, version) for rank in ranks}
        return await outcomes(calls)

    run(group.take_weights(bring, version))


def request(uid: str, prompt: int | None = None) -> GroupRequest:
    """By default each has a prompt of its own."""
    token_ids = np.frombuffer(uid.encode(), np.int8) if prompt is None else np.array([prompt], np.int32)
    return GroupRequest(uid, token_ids, SAMPLING, Task("", "", {}))


async def sample(group: RolloutGroup, *requests: GroupRequest) -> list[DataProtoRef]:
    return list(await asyncio.gather(*(group.generate(each) for each in requests)))


def generate(group: RolloutGroup, *uids: str) -> list[DataProtoRef]:
    return run(sample(group, *(request(uid) for uid in uids)))


@contextlib.contextmanager
def in_flight(group: RolloutGroup, *requests: GroupRequest) -> Iterator[list[int]]:
    """Groups that are asked for, one after the other: the ranks they went to. At the end nobody wants them any more."""

    async def begin() -> list[asyncio.Task[DataProtoRef]]:
        tasks = [asyncio.create_task(group.generate(each)) for each in requests]
        await asyncio.sleep(0)
        return tasks

    async def cancel(tasks: list[asyncio.Task[DataProtoRef]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    ranks: list[int] = []
    post = group.workers.post

    def note(rank: int, *args: Any) -> Call:
        ranks.append(rank)
        return post(rank, *args)

    group.workers.post = note  # type: ignore[method-assign]
    tasks = run(begin())
    try:
        yield ranks
    finally:
        group.workers.post = post  # type: ignore[method-assign]
        run(cancel(tasks))


def test_groups_are_spread_evenly(make: Callable[..., RolloutGroup]) -> None:
    with in_flight(make(), *(request(f"slow {i}") for i in range(10))) as ranks:
        assert [ranks.count(rank) for rank in (0, 1)] == [5, 5]


@pytest.mark.deep
def test_a_prompt_comes_back_to_the_engine_that_has_its_prefix_until_new_weights_come(make: Callable) -> None:
    group = make()
    first = [request("slow a", 0), request("slow b", 1), *(request(f"slow {i}", 1) for i in range(3))]
    with in_flight(group, *first) as ranks:
        assert sorted(ranks[:2]) == [0, 1]
        assert ranks[2:] == [ranks[1]] * 3
        sync(group, ["good"], 1)
        with in_flight(group, request("slow later", 1)) as later:
            assert later == [ranks[0]], "the least loaded"


def test_what_a_dead_worker_was_asked_for_another_one_answers_and_the_worker_comes_back(make: Callable) -> None:
    group = make(most=1)
    sync(group, ["good"], 5)
    before = group.workers.call_all("pid", "pid")

    async def ask() -> list[DataProtoRef]:
        """The first process dies before it has answered anything."""
        tasks = [asyncio.create_task(group.generate(request(f"slow {i}"))) for i in range(6)]
        await asyncio.sleep(0)
        group.workers.tell(0, "die")
        return list(await asyncio.gather(*tasks))

    answers = run(ask())
    assert [answer.small["uid"] for answer in answers] == [f"slow {i}" for i in range(6)]
    assert before[0] not in {answer.small["pid"] for answer in answers}
    assert len(group.restarts.failures) == 1
    assert "rollout worker 0" in group.restarts.failures[0]
    after = group.workers.call_all("pid", "pid")
    assert (after[0] != before[0], after[1]) == (True, before[1])
    answers, number = [], 0
    while after[0] not in {answer.small["pid"] for answer in answers}:
        number += 1
        answers += generate(group, *(f"slow again {number} {i}" for i in range(6)))
    assert {answer.small["version"] for answer in answers} == {5}, "the new process has the weights in force"


@pytest.mark.deep
def test_what_a_worker_has_answered_outlives_it(make: Callable) -> None:
    group = make(1, most=1)
    (answer,) = generate(group, "answered")
    group.workers.kill()
    (block,) = answer.frames[0].blocks
    assert (ray.get(block, timeout=30)["pid"] == answer.small["pid"]).all()


@pytest.mark.deep
def test_an_engine_that_fails_is_replaced_and_one_that_fails_too_often_stops_the_run(make: Callable) -> None:
    group = make(1, most=1)
    with refuses(EngineError, "EngineDeadError") as caught:
        generate(group, "engine fails")
    (note,) = caught.value.__notes__
    says(note, "trainer.max_worker_restarts=1")
    assert len(group.restarts.failures) == 1
    with refuses(EngineError, "EngineDeadError"):
        generate(group, "anything: nobody would answer")


@pytest.mark.deep
def test_a_mistake_of_the_users_is_not_tried_again(make: Callable) -> None:
    group = make(1, most=3)
    with refuses(ConfigError, "temperature=10"):
        generate(group, "user's mistake")
    assert len(group.restarts.failures) == 0
    assert len(generate(group, "fine")) == 1


@pytest.mark.deep
def test_a_group_with_too_few_episodes_left_is_no_fault_of_its_worker(make: Callable) -> None:
    group, failed = make(1, most=0), list[AgentError]()
    with refuses(AgentError, "two") as caught:
        run(group.generate(request("too few are left"), on_failed=failed.extend))
    assert [(error.kind, error.was_last) for error in failed] == [("error", False), ("timeout", True)]
    assert caught.value is failed[1]
    assert len(generate(group, "fine")) == 1


@pytest.mark.deep
def test_a_worker_that_hangs_is_replaced(make: Callable) -> None:
    group = make(1, most=1)
    group.workers.call(0, "test", "hang_from_now_on")
    group.workers.limits = TimeLimits(240.0, {"generate": 0.5})

    async def hang() -> DataProtoRef:
        asked = asyncio.create_task(group.generate(request("once")))
        await asyncio.sleep(0)
        group.workers.limits = TimeLimits(240.0)  # the new process may take longer
        return await asked

    assert run(hang()).small["uid"] == "once"
    says(group.restarts.failures[0], "rollout worker 0", "'generate'", "0.5 s")


@pytest.mark.deep
def test_a_worker_that_dies_in_a_sync_does_not_hold_up_the_others(make: Callable) -> None:
    group = make(most=1)
    sync(group, ["good"], 4)
    group.workers.call(0, "test", "set_version", 5)
    started = time.monotonic()
    sync(group, ["deadly for 0"], 6)
    assert time.monotonic() - started < 60
    while not group.restarts.failures:
        time.sleep(0.01)
    assert len(group.restarts.failures) == 1
    with in_flight(group, request("slow now")) as ranks:
        assert ranks == [1], "the one that lives goes on at once"
    answers, number = [], 0
    while not answers or group.workers.call(0, "test", "pid") not in {answer.small["pid"] for answer in answers}:
        number += 1
        answers += generate(group, *(f"slow {number} {i}" for i in range(6)))
    assert {answer.small["version"] for answer in answers} == {6}, "the new process too"


@pytest.mark.deep
def test_a_worker_that_comes_back_during_an_update_waits_for_the_next_weights(make: Callable) -> None:
    """The actor no longer holds those that the others have."""
    group = make(1, most=1)
    sync(group, ["good"], 1)
    run(group.begin_update())
    group.workers.tell(0, "die")

    async def ask() -> DataProtoRef:
        asked = asyncio.create_task(group.generate(request("during the update")))
        while not group.restarts.failures:
            await asyncio.sleep(0.01)
        await group.started()
        assert [member.load for member in group.members] == [math.inf]
        return await asked

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run, ask())
        while not group.restarts.failures:
            time.sleep(0.01)
        sync(group, ["good"], 2)
        assert asked.result().small["version"] == 2


@pytest.mark.deep
def test_damaged_weights_and_other_versions_are_errors(make: Callable) -> None:
    group = make(1, most=3)
    with refuses(WeightSyncError, "bucket 0", "damaged"):
        sync(group, ["damaged"], 1)
    with refuses(GrpoDistError, "rollout worker 0", "version 99", "sync of 2"):
        sync(group, ["ignored"], 2)
    assert len(group.restarts.failures) == 0


@pytest.mark.deep
def test_without_a_budget_the_first_failure_stops_the_run(make: Callable) -> None:
    group = make(1)
    group.workers.tell(0, "die")
    with refuses(WorkerError, "rollout worker 0", "'generate'", "died"):
        generate(group, "slow")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ((64, 0), 68),  # none waits: more
        ((64, 8), 64),  # some wait, as they should
        ((20, 44), 28),  # memory is full: what runs, and an eighth of what could
    ],
)
def test_the_number_in_flight_follows_the_engines_load(load: tuple[int, int], expected: int) -> None:
    member = Engine(max_num_seqs=64, limit=64)
    member.adapt(*load, group_size=4)
    assert member.limit == expected


@pytest.mark.deep
def test_an_engine_in_which_many_wait_leaves_later_groups_to_the_other(make: Callable[..., RolloutGroup]) -> None:
    """Its memory is full with 4 sequences, so that with 32 waiting (an eighth of 256) it has all it may have."""
    group = make()
    group.workers.call(0, "test", "set_load", 4, 200)
    assert len(generate(group, "a", "b")) == 2
    uids = [f"{i}" for i in range(54)]
    with in_flight(group, *(request(f"slow {uid}") for uid in uids)) as ranks:
        assert (ranks.count(0), ranks.count(1)) == (6, 48), "in proportion to the limits: 36 and 288 sequences"
    group.workers.call(0, "test", "set_load", 36, 0)
    generate(group, *(f"again {uid}" for uid in uids))
    with in_flight(group, *(request(f"slow later {uid}") for uid in uids)) as ranks:
        assert ranks.count(0) > 6, "it takes more when none waits"


@pytest.mark.deep
def test_the_number_in_flight_has_an_upper_bound() -> None:
    member = Engine(max_num_seqs=64, limit=70)
    member.adapt(64, 0, group_size=4)
    assert member.limit == 72
