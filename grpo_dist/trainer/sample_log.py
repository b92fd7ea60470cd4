"""Writes the samples of each step to a file, and reads a few validation samples for display."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_dist.config.schema import TrainerConfig
from grpo_dist.sizes import GIB
from grpo_dist.tracking.record import ROLLOUTS, VALIDATION
from grpo_dist.trainer.validation import shown_rows
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.reward_pool import RewardPool
from grpo_dist.workers.rollout_group import GroupRequest


@dataclass
class SampleLog:
    """Turns batches into text, in the reward processes, which have the tokenizer.

    Attributes:
        config: `trainer`.
        reward: the reward processes.
    """

    config: TrainerConfig
    reward: RewardPool
    _writing: list[asyncio.Task[None]] = field(default_factory=list)

    async def write_rollouts(self, step: int, batch: DataProtoRef, requests: Sequence[GroupRequest]) -> None:
        """Start writing a training step, its tokens too; first waits for the previous files."""
        await self.collect()
        if self.config.log_rollouts:
            limit = self.config.log_rollouts_max_gib
            most_bytes = math.inf if limit is None else limit * GIB
            arguments = self._path(ROLLOUTS, step), step, _ground_truths(requests), most_bytes
            self._writing.append(self.reward.write_rollouts(batch, *arguments))

    async def write_validation(self, step: int, batch: DataProtoRef, requests: Sequence[GroupRequest]) -> None:
        """Start writing the responses of a validation as text; first waits for the previous files."""
        await self.collect()
        if self.config.log_rollouts:
            path = self._path(VALIDATION, step)
            self._writing.append(self.reward.write_samples(batch, path, step, _ground_truths(requests)))

    def _path(self, folder: str, step: int) -> str:
        return str((self.config.record_dir / folder / f"{step}.jsonl").absolute())

    async def collect(self) -> None:
        """Wait until all started files are written."""
        for writing in self._writing:
            await writing
        self._writing.clear()

    async def read_some(self, step: int, batch: DataProtoRef, requests: Sequence[GroupRequest]) -> list[dict[str, Any]]:
        """Read `log_val_generations` rows as text; the same rows at every validation."""
        count = self.config.log_val_generations
        if not count:
            return []
        rows = batch.reorder(shown_rows(len(batch), count, self.config.seed))
        return await self.reward.read_samples(rows, step, _ground_truths(requests))


def _ground_truths(requests: Sequence[GroupRequest]) -> dict[str, Any]:
    return {request.uid: request.task.ground_truth for request in requests}
