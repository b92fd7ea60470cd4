"""A training step whose batch is being sampled: the prompts that were drawn for it, and what has become of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.trainer.rollout.job import RolloutJob
from grpo_dist.workers.rollout_group import GroupRequest


@dataclass
class OpenStep:
    """A step whose batch is being sampled.

    Attributes:
        drawn: the batches of prompts (positions in the training set), in the order they were drawn.
        jobs: a job for each batch that was sent to the pump.
        kept: groups that train.
        dropped: by batch, the positions of groups that do not train: cancelled, surplus, or with equal rewards.
        num_complete: batches whose groups are all in `kept` or `dropped`.
        num_learned: batches whose scores `order` was told before a resume.
        num_filtered: dropped groups with equal rewards.
        num_surplus: dropped groups beyond a full batch.
        num_dropped_tokens: of the responses of both.
        filling: the task that samples until the batch is full.
    """

    drawn: list[list[int]] = field(default_factory=list)
    jobs: list[RolloutJob] = field(default_factory=list)
    kept: list[tuple[GroupRequest, DataProtoRef]] = field(default_factory=list)
    dropped: dict[int, set[int]] = field(default_factory=dict)
    num_complete: int = 0
    num_learned: int = 0
    num_filtered: int = 0
    num_surplus: int = 0
    num_dropped_tokens: int = 0
    filling: asyncio.Task[None] | None = None

    @property
    def num_sampled(self) -> int:
        """Groups of complete batches, without cancelled ones."""
        return len(self.kept) + self.num_filtered + self.num_surplus

    def prompts(self) -> list[list[int]]:
        """`drawn` without the prompts whose groups do not train in this step."""
        return [
            [prompt for i, prompt in enumerate(batch) if i not in self.dropped.get(number, ())]
            for number, batch in enumerate(self.drawn)
        ]
