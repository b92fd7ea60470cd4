"""A training step whose batch is being sampled: the prompts that were drawn for it, and what has become of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from grpo_dist.roles.rollout_group import GroupRequest
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.trainer.rollout.job import RolloutJob


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
        ready: of the batch that is being sampled the first groups, by the order of the prompts, up to one that is not
            there yet; only with `trainer.stream_mini_batches`.
        num_settled: prompts of that batch that are in `ready`, or whose groups have failed.
        num_taken: groups that train already.
        news: set when `ready` has changed, or `filling` has ended.
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
    ready: list[DataProtoRef] = field(default_factory=list)
    num_settled: int = 0
    num_taken: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

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

    def begin(self, filling: asyncio.Task[None]) -> None:
        """Note the task that samples."""
        self.filling = filling
        filling.add_done_callback(lambda _: self.news.set())

    async def take(self, start: int, stop: int) -> DataProtoRef:
        """Wait for the groups `start` to `stop` - 1 of those that train, while others are sampled."""
        assert self.filling is not None
        while not self.filling.done() and len(self.kept) + len(self.ready) < stop:
            self.news.clear()
            await self.news.wait()
        if self.filling.done():
            self.filling.result()  # it may have failed
        self.num_taken = stop
        return DataProtoRef.concat([*(group for _, group in self.kept), *self.ready][start:stop])

    @property
    def trains(self) -> bool:
        """Tell if groups of the batch of prompts that is being sampled train already."""
        return self.num_taken > len(self.kept)

    def begin_batch(self) -> None:
        """Forget what is `ready`: another batch of prompts follows, or the same one again."""
        self.ready, self.num_settled = [], 0
