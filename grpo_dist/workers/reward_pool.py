"""The reward processes as the driver sees them: a pool whose workers score groups, and have whole batches to do.

A process that is lost is replaced (pool.py). A mistake of the reward function is not that: it is shown
(rewards/scorer.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray

from grpo_dist.algorithms.targets import TargetSettings
from grpo_dist.engines.train.durable_files import FileDigest
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.batch_work import SAMPLE_COLUMNS, TARGET_COLUMNS
from grpo_dist.workers.group import Call, WorkerGroup
from grpo_dist.workers.pool import Pool
from grpo_dist.workers.restarts import RestartBudget
from grpo_dist.workers.reward import Task

MOST_PRINTED = 10  # lines that the reward function prints, in one step


class RewardPool(Pool):
    """The reward processes. Each scores one group at a time, so that the time limit of a call is its own.

    Args:
        workers: their processes.
        restarts: how many may be replaced.
    """

    def __init__(self, workers: WorkerGroup, restarts: RestartBudget | None = None) -> None:
        super().__init__(workers, restarts or RestartBudget())
        self._printed: list[str] = []
        self._num_more_printed = 0

    # --- scores ------------------------------------------------------------------------------------------------
    async def score(self, group: DataProtoRef, task: Task, limit_s: float) -> tuple[DataProtoRef, list[str]]:
        """Score one group on a free process.

        Args:
            group: with responses.
            task: what the reward function is told.
            limit_s: seconds after which the process counts as hung.

        Returns:
            The handle of the group's scores, and why responses of it could not be scored.

        Raises:
            GrpoDistError: a mistake that another process would make too; RewardError if too many were lost.
        """
        inputs = group.select(("responses", "response_mask"))

        def send(rank: int) -> Call:
            return self.workers.submit_for_data(rank, "score", "score", inputs, task, limit_s=limit_s)

        def take_in(call: Call, answer: Any) -> tuple[DataProtoRef, list[str]]:
            label, failures, (lines, num_more) = answer
            self.note_printed(lines, num_more)
            return call.handle(label), failures

        return await self.ask(send, take_in)

    def take_printed(self) -> list[str]:
        """The first lines that the reward function has printed since the last time, and how many more came."""
        more = [f"... and {self._num_more_printed} more lines"] if self._num_more_printed else []
        lines = self._printed + more
        self._printed, self._num_more_printed = [], 0
        return lines

    def note_printed(self, lines: list[str], num_more: int) -> None:
        """Keep lines that the reward function has printed, and count those that a process did not send."""
        room = MOST_PRINTED - len(self._printed)
        self._printed += lines[:room]
        self._num_more_printed += num_more + len(lines[room:])

    # --- whole batches: beside the scores, for they must not wait for one group's ----------------------------------
    async def compute_targets(
        self, batch: DataProtoRef, settings: TargetSettings, kl_coef: float, seed: int
    ) -> tuple[DataProtoRef, dict[str, float]]:
        """What the update trains on, from the whole batch; and metrics."""
        arguments = batch.select(("uid", *TARGET_COLUMNS, *settings.columns)), settings, kl_coef, seed

        def send(rank: int) -> Call:
            return self.workers.submit_for_data(rank, "targets", "compute_targets", *arguments)

        return await self.ask_now(send, lambda call, answer: (call.handle(answer[0]), answer[1]))

    async def rollout_diagnostics(self, batch: DataProtoRef, correction: Mapping[str, Any]) -> dict[str, float]:
        """How far the sampler and the policy are apart, and what the correction's weights are."""
        inputs = batch.select(("response_mask", "rollout_log_probs", "old_log_probs"))
        return await self._ask_any("rollout_diagnostics", "rollout_diagnostics", inputs, correction)

    async def read_samples(
        self, batch: DataProtoRef, step: int, ground_truths: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """The batch as text, one dict per row; for the few rows that are shown."""
        return await self._ask_any("read_samples", "read_samples", batch.select(SAMPLE_COLUMNS), step, ground_truths)

    def write_samples(
        self, batch: DataProtoRef, path: str, step: int, ground_truths: Mapping[str, Any]
    ) -> asyncio.Task[None]:
        """Begin to write the batch down as text."""
        arguments = batch.select(SAMPLE_COLUMNS), path, step, ground_truths
        return self.spawn(self._ask_any("write_samples", "write_samples", *arguments))

    def write_groups(self, groups: DataProtoRef, path: str) -> asyncio.Task[dict[str, FileDigest]]:
        """Begin to write scored groups into a checkpoint, as `path` with several endings."""
        return self.spawn(self._ask_any("save_checkpoint", "write_groups", groups, path))

    async def read_groups(self, path: str, small: Sequence[str]) -> tuple[dict[str, np.ndarray], ray.ObjectRef]:
        """What was written there: the columns named in `small`, and all of it in the object store."""

        def send(rank: int) -> Call:
            return self.workers.submit_for_data(rank, "load_checkpoint", "read_groups", path, list(small))

        return await self.ask_now(send, lambda call, columns: (columns, call.data))

    async def _ask_any(self, stage: str, method: str, *arguments: Any) -> Any:
        def send(rank: int) -> Call:
            return self.workers.submit(rank, stage, method, *arguments)

        return await self.ask_now(send, lambda call, answer: answer)
