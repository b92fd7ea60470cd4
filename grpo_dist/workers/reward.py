"""The reward processes: they score groups (scorer.py), make targets (targets.py) and write records (records.py).

A lost process is replaced (pool.py). An error of the reward function is not a lost process: rewards/scorer.py reports
it.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from grpo_dist.algorithms.settings import TargetSettings
from grpo_dist.engines.train.durable_files import FileDigest
from grpo_dist.errors import GrpoDistError
from grpo_dist.protocol.fields import columns_for
from grpo_dist.rewards.scorer import PrintedLines
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.event_loop import give
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.runtime.pool import Pool
from grpo_dist.tracking.rollouts import is_recorded
from grpo_dist.workers.records import RecordWriter
from grpo_dist.workers.scorer import ResponseScorer, Task
from grpo_dist.workers.targets import Causes, TargetMaker

# Groups that come together are scored in one call, as many as take about this long, and at most so many: a Ray call
# takes as long as a quick reward function needs for some groups.
SCORED_AT_ONCE_S, SCORED_AT_ONCE = 0.05, 32


class RewardWorker(ResponseScorer, TargetMaker, RecordWriter):
    """One process of the pool."""


@dataclass(eq=False)
class _Unscored:
    """A group that waits for its scores."""

    group: DataProtoRef
    task: Task
    limit_s: float
    scored: asyncio.Future[tuple[DataProtoRef, list[str]]]


class RewardPool(Pool):
    """The reward processes. Each has one call at a time: a queued one would use up its time limit while waiting.

    `printed` is what custom code has printed, in these processes and in others of the run.
    """

    def __init__(self, workers: WorkerGroup, restarts: RestartBudget | None = None) -> None:
        super().__init__(workers, restarts or RestartBudget())
        self.printed = PrintedLines()
        self._unscored: list[_Unscored] = []
        self._seconds = math.inf  # that a group takes, lately

    # --- scores ------------------------------------------------------------------------------------------------
    async def score(self, group: DataProtoRef, task: Task, limit_s: float) -> tuple[DataProtoRef, list[str]]:
        """Score one group on a free process, which counts as hung after `limit_s` seconds.

        Returns:
            (a handle to the group's scores, an error message for each response that could not be scored).

        Raises:
            GrpoDistError: an error that would occur in every process, or the restart budget is used up.
        """
        inputs = group.select(columns_for(group.columns, "scorer", "endpoint"))
        loop = asyncio.get_running_loop()
        if not self._unscored:
            loop.call_soon(self._score_waiting)
        self._unscored.append(_Unscored(inputs, task, limit_s, loop.create_future()))
        return await self._unscored[-1].scored

    def _score_waiting(self) -> None:
        """Share the groups that have come in this turn of the loop among the processes."""
        waiting = [group for group in self._unscored if not group.scored.cancelled()]
        self._unscored = []
        for validation in (False, True):  # the two have different columns
            groups = [group for group in waiting if group.task.validation == validation]
            share = math.ceil(len(groups) / len(self.workers))
            size = max(min(share, int(SCORED_AT_ONCE_S / self._seconds), SCORED_AT_ONCE), 1)
            for start in range(0, len(groups), size):
                part = groups[start : start + size]
                scoring = self.spawn(self._score_together(part))
                for group in part:
                    group.scored.add_done_callback(functools.partial(_unwanted, part, scoring))

    async def _score_together(self, groups: Sequence[_Unscored]) -> None:
        inputs = DataProtoRef.concat([group.group for group in groups])
        tasks, sizes = [group.task for group in groups], [len(group.group) for group in groups]
        limit_s = sum(group.limit_s for group in groups)

        def send(rank: int) -> Call:
            return self.workers.submit_for_data(rank, "score", "score", inputs, sizes, tasks, limit_s=limit_s)

        def take_in(call: Call, answer: Any) -> list[tuple[DataProtoRef, list[str]]]:
            outcomes, printed, seconds = answer
            self._seconds = max(seconds / len(groups), 1e-6)
            self.printed.note("reward function", *printed)
            rows = np.cumsum([0, *sizes])
            return [(call.handle(label, row), failures) for (label, failures), row in zip(outcomes, rows, strict=False)]

        try:
            outcomes = await self.ask(send, take_in)
        except GrpoDistError as error:
            for group in groups:
                give(group.scored, error)
        else:
            for group, one in zip(groups, outcomes, strict=True):
                give(group.scored, one)

    # --- whole batches: without the queue, so that they do not wait for scores --------------------------------------
    async def compute_targets(
        self, batch: DataProtoRef, settings: TargetSettings, kl_coef: float, seed: int
    ) -> tuple[DataProtoRef, dict[str, float]]:
        """Advantages and the other inputs of the update, from the whole batch; and metrics."""
        arguments = batch.select(("uid", *settings.columns)), settings, kl_coef, seed

        def send(rank: int) -> Call:
            return self.workers.submit_for_data(rank, "targets", "compute_targets", *arguments)

        def take_in(call: Call, answer: Any) -> tuple[DataProtoRef, dict[str, float]]:
            label, metrics, printed = answer
            self.printed.note("advantage or KL estimator", *printed)
            return call.handle(label), metrics

        return await self.ask_now(send, take_in)

    async def rollout_diagnostics(
        self, batch: DataProtoRef, correction: Mapping[str, Any] | None, causes: Causes | None = None
    ) -> dict[str, float]:
        """See `TargetMaker.rollout_diagnostics`."""
        return await self._ask_any("rollout_diagnostics", "rollout_diagnostics", _diagnosed(batch), correction, causes)

    async def compare_log_probs(self, batch: DataProtoRef, version: int) -> tuple[int, float, float, str]:
        """See `TargetMaker.compare_log_probs`."""
        return await self._ask_any("rollout_diagnostics", "compare_log_probs", _diagnosed(batch), version)

    async def read_samples(self, batch: DataProtoRef, *arguments: Any) -> list[dict[str, Any]]:
        """See `RecordWriter.read_samples`; meant for a few rows that are shown."""
        rows = batch.select(columns_for(batch.columns, "samples"))
        return await self._ask_any("read_samples", "read_samples", rows, *arguments)

    def write_samples(self, batch: DataProtoRef, *arguments: Any) -> asyncio.Task[None]:
        """Start `RecordWriter.write_samples`."""
        rows = batch.select(columns_for(batch.columns, "samples"))
        return self.spawn(self._ask_any("write_samples", "write_samples", rows, *arguments))

    def write_rollouts(self, batch: DataProtoRef, *arguments: Any) -> asyncio.Task[None]:
        """Start `RecordWriter.write_rollouts`."""
        recorded = {name for name in batch.columns if is_recorded(name)}
        rows = batch.select(recorded.union(columns_for(batch.columns, "samples")))
        return self.spawn(self._ask_any("write_samples", "write_rollouts", rows, *arguments))

    def write_judged(self, batch: DataProtoRef, *arguments: Any) -> asyncio.Task[None]:
        """Start `RecordWriter.write_judged`."""
        rows = batch.select(columns_for(batch.columns, "judged"))
        return self.spawn(self._ask_any("write_judged", "write_judged", rows, *arguments))

    def write_groups(self, groups: DataProtoRef, path: str) -> asyncio.Task[dict[str, FileDigest]]:
        """Start `RecordWriter.write_groups`."""
        return self.spawn(self._ask_any("save_checkpoint", "write_groups", groups, path))

    async def read_groups(self, path: str, small: Sequence[str]) -> tuple[dict[str, np.ndarray], ray.ObjectRef]:
        """Read what `write_groups` wrote: (the columns named in `small`, a reference to all columns)."""

        def send(rank: int) -> Call:
            return self.workers.submit_for_data(rank, "load_checkpoint", "read_groups", path, list(small))

        return await self.ask_now(send, lambda call, columns: (columns, call.data))

    async def _ask_any(self, stage: str, method: str, *arguments: Any) -> Any:
        def send(rank: int) -> Call:
            return self.workers.submit(rank, stage, method, *arguments)

        return await self.ask_now(send, lambda call, answer: answer)


def _diagnosed(batch: DataProtoRef) -> DataProtoRef:
    return batch.select(columns_for(batch.columns, "diagnostics"))


def _unwanted(groups: Sequence[_Unscored], scoring: asyncio.Task[None], *_: Any) -> None:
    """Do not ask for scores that nobody waits for any more."""
    if all(group.scored.cancelled() for group in groups):
        scoring.cancel()
