"""Rollout workers that die and hang: others answer what they were asked for, and take their place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import ray
import torch

from grpo_dist.engines.base import EngineLoad
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import AgentError
from grpo_dist.protocol import DataProto
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.event_loop import TimeLimits, run
from grpo_dist.runtime.mailbox import Mailbox
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.runtime.process import Process
from grpo_dist.workers.rollout import GroupRequest, RolloutGroup
from grpo_dist.workers.scorer import Task
from grpo_dist.workers.weight_transport import Outcomes, outcomes
from tests.messages import says
from tests.processes import spawned

pytestmark = pytest.mark.ray


class Worker(Mailbox, Process):
    """Answers with its process id and the weights it holds, slowly or never."""

    version, hangs = -1, False

    async def start(self, settings: object) -> None: ...

    async def generate(
        self, uid: str, prompt: np.ndarray, sampling: SamplingSettings, task: object
    ) -> tuple[tuple[Label | None, EngineLoad, list[AgentError]], DataProto | None]:
        if uid.startswith("slow"):
            await asyncio.sleep(1.0)
        if self.hangs:
            await asyncio.sleep(1000)
        label = Label(("pid",), {"uid": uid, "pid": os.getpid(), "version": self.version}, 1)
        return (label, EngineLoad(), []), DataProto.from_dict({"pid": torch.full((1, 100_000), os.getpid())})

    async def load_weights(self, buckets: list, version: int) -> int:
        if buckets == ["deadly for 0"] and self.version == 5:
            os._exit(1)
        self.version = version
        return self.version

    async def set_version(self, version: int) -> None:
        self.version = version

    async def hang_from_now_on(self) -> None:
        self.hangs = True

    async def die(self) -> None:
        os._exit(1)

    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def make(local_ray: None) -> Iterator[Callable[..., RolloutGroup]]:
    with contextlib.ExitStack() as processes:

        def make(size: int = 2) -> RolloutGroup:
            group = RolloutGroup(processes.enter_context(spawned("rollout", Worker, [()] * size)), RestartBudget(1))
            run(group.start([None] * size))
            return group

        yield make


def sync(group: RolloutGroup, buckets: list, version: int) -> None:
    async def bring(ranks: Sequence[int]) -> Outcomes:
        calls = {rank: group.workers.submit(rank, "sync", "load_weights", buckets, version) for rank in ranks}
        return await outcomes(calls)

    run(group.take_weights(bring, version))


def ask(group: RolloutGroup, uid: str) -> asyncio.Task[DataProtoRef]:
    """Each has a prompt of its own."""
    prompt, sampling = np.frombuffer(uid.encode(), np.int8), SamplingSettings(4, 1.0, 1.0, -1, 8, None)
    return asyncio.create_task(group.generate(GroupRequest(uid, prompt, sampling, Task("", "", {}))))


def generate(group: RolloutGroup, *uids: str, meanwhile: Callable[[], object] = lambda: None) -> list[DataProtoRef]:
    async def sample() -> list[DataProtoRef]:
        tasks = [ask(group, uid) for uid in uids]
        await asyncio.sleep(0)
        meanwhile()
        return list(await asyncio.gather(*tasks))

    return run(sample())


def versions_once_back(group: RolloutGroup) -> set[int]:
    """The weights of all that is answered until the new process of rank 0 takes part."""
    run(group.started())
    answers, number, pid = [], 0, group.workers.call(0, "test", "pid")
    while pid not in {answer.small["pid"] for answer in answers}:
        number += 1
        answers += generate(group, *(f"slow again {number} {i}" for i in range(6)))
    return {answer.small["version"] for answer in answers}


def test_what_a_dead_worker_was_asked_for_another_one_answers_and_the_worker_comes_back(make: Callable) -> None:
    """What it has answered outlives it."""
    group = make()
    sync(group, ["good"], 5)
    before = group.workers.call_all("pid", "pid")
    answered = generate(group, "a", "b")
    assert {answer.small["pid"] for answer in answered} == set(before)
    uids = [f"slow {i}" for i in range(6)]
    answers = generate(group, *uids, meanwhile=lambda: group.workers.tell(0, "die"))
    assert [answer.small["uid"] for answer in answers] == uids
    assert before[0] not in {answer.small["pid"] for answer in answers}
    (failure,) = group.restarts.failures
    says(failure, "rollout worker 0", "'generate'", "died")
    assert versions_once_back(group) == {5}, "the new process has the weights in force"
    after = group.workers.call_all("pid", "pid")
    assert (after[0] != before[0], after[1]) == (True, before[1])
    for answer in answered:
        (block,) = answer.frames[0].blocks
        assert (ray.get(block, timeout=30)["pid"] == answer.small["pid"]).all()


@pytest.mark.deep
def test_a_worker_that_hangs_is_replaced(make: Callable) -> None:
    group = make(1)
    group.workers.call(0, "test", "hang_from_now_on")
    group.workers.limits = TimeLimits(240.0, {"generate": 0.5})

    def patient() -> None:
        group.workers.limits = TimeLimits(240.0)  # the new process may take longer

    assert generate(group, "once", meanwhile=patient)[0].small["uid"] == "once"
    says(group.restarts.failures[0], "rollout worker 0", "'generate'", "0.5 s")


@pytest.mark.deep
def test_a_worker_that_dies_in_a_sync_does_not_hold_up_the_others(make: Callable) -> None:
    group = make()
    sync(group, ["good"], 4)
    group.workers.call(0, "test", "set_version", 5)
    started = time.monotonic()
    sync(group, ["deadly for 0"], 6)
    assert time.monotonic() - started < 60
    while not group.restarts.failures:
        time.sleep(0.01)
    assert len(group.restarts.failures) == 1
    (answer,) = generate(group, "now")
    assert answer.small["pid"] == group.workers.call(1, "test", "pid"), "the one that lives goes on at once"
    assert versions_once_back(group) == {6}, "the new process too"
