"""Groups that nobody wants any more: on workers that are none."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from grpo_dist.engines.base import EngineLoad
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import ConfigError, GrpoDistError, WorkerLost
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.workers.rollout import GroupRequest, RolloutGroup
from grpo_dist.workers.scorer import Task
from tests.runtime.fake_nodes import FakeNodes


class Call:
    """One that the test answers."""

    rank, process, is_current = 0, "process", True

    def __init__(self) -> None:
        self.answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def answer(self) -> Any:
        return await self.answered

    def handle(self, label: Any) -> Any:
        return label


class Workers:
    """One worker, which is none."""

    role, handles, present, bundles = "rollout", ["process"], [0], ()

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.told: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return 1

    def is_required(self, rank: int) -> bool:
        return True

    def post(self, *args: Any) -> Call:
        self.calls.append(Call())
        return self.calls[-1]

    def tell(self, *args: Any) -> None:
        self.told.append(args)

    def retire(self, rank: int) -> None:
        """It has no process."""

    def node_id(self, rank: int) -> str:
        return ""


@pytest.mark.parametrize(
    "end",
    [
        (None, EngineLoad()),
        ("its label", EngineLoad()),
        WorkerLost("its process died", "rollout", 0),
        ConfigError("vLLM refuses the settings"),
    ],
    ids=["aborted", "finished before the abort came", "worker lost", "refused"],
)
def test_nothing_is_kept_of_a_group_that_was_to_be_aborted_however_it_ends(end: Any) -> None:
    """What is kept of a call would pin its responses in the object store."""

    async def abort_one() -> None:
        workers = Workers()
        group = RolloutGroup(workers, RestartBudget(0, FakeNodes()))  # type: ignore[arg-type]
        sampling = SamplingSettings(4, 1.0, 1.0, -1, 8, None)
        request = GroupRequest("a group", np.array([1], np.int32), sampling, Task("", "", {}))
        asked = asyncio.create_task(group.generate(request))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert workers.told == [(0, "abort", ["a group"])]
        assert len(group._aborted) == 1
        (call,), (task,) = workers.calls, group._tasks
        if isinstance(end, GrpoDistError):
            call.answered.set_exception(end)
        else:
            call.answered.set_result(end)
        await asyncio.gather(task, return_exceptions=True)
        assert not group._aborted

    run(abort_one())
