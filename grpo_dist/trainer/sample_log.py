"""What was sampled, as text: every step's in a file, and a few validation responses for people to read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_dist.config.schema import TrainerConfig
from grpo_dist.trainer.validation import shown_rows
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.reward_pool import RewardPool
from grpo_dist.workers.rollout_group import GroupRequest


@dataclass
class SampleLog:
    """Has reward processes, which hold the tokenizer, turn batches into text.

    Attributes:
        config: `trainer`.
        reward: the reward processes.
    """

    config: TrainerConfig
    reward: RewardPool
    _writing: list[asyncio.Task[None]] = field(default_factory=list)

    async def write(self, folder: str, step: int, batch: DataProtoRef, requests: Sequence[GroupRequest]) -> None:
        """Write a batch to FOLDER/STEP.jsonl of the run directory; at most one file behind, so failures show."""
        await self.collect()
        if self.config.log_rollouts:
            path = str((self.config.record_dir / folder / f"{step}.jsonl").absolute())
            self._writing.append(self.reward.write_samples(batch, path, step, _ground_truths(requests)))

    async def collect(self) -> None:
        """Wait until what was begun is written."""
        for writing in self._writing:
            await writing
        self._writing.clear()

    async def read_some(self, step: int, batch: DataProtoRef, requests: Sequence[GroupRequest]) -> list[dict[str, Any]]:
        """`log_val_generations` rows, the same ones each time, as text."""
        count = self.config.log_val_generations
        if not count:
            return []
        rows = batch.reorder(shown_rows(len(batch), count, self.config.seed))
        return await self.reward.read_samples(rows, step, _ground_truths(requests))


def _ground_truths(requests: Sequence[GroupRequest]) -> dict[str, Any]:
    return {request.uid: request.task.ground_truth for request in requests}
