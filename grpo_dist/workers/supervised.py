"""The role that trains on rows with known answers: the worker of a rank, and the group of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from grpo_dist.algorithms.settings import TrainingSettings
from grpo_dist.protocol import DataProto, Metric, merge_metrics
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.workers.gang import Gang, PolicyWorker, on_device, passes

T = TypeVar("T")


class SupervisedWorker(PolicyWorker):
    """One rank of the model. Every method is collective over the ranks."""

    @on_device()
    def train(self, rows: DataProtoRef, objective: TrainingSettings, step: int) -> dict[str, Metric]:
        """Take one optimizer step on this rank's rows, which have the columns of the objective; returns its metrics."""
        return self._over(rows, objective, f"step {step}: ", self.engine.train_mini_batch).metrics

    @on_device(reads=True)
    def evaluate(self, rows: DataProtoRef, objective: TrainingSettings, step: int) -> dict[str, Metric]:
        """Return the metrics of this rank's rows after a step, without another one; see `train`."""
        return self._over(rows, objective, f"validation after step {step}: ", self.engine.evaluate)

    def _over(self, rows: DataProtoRef, objective: TrainingSettings, where: str, compute: Callable[..., T]) -> T:
        """Return what the engine computes in passes over rows; `where` begins the message of a loss that diverged."""
        limits = self.settings.update
        assert limits is not None, "it trains"
        with passes(limits, where):
            return compute(rows.fetch(rows.columns), objective, limits)


class SupervisedGroup(Gang):
    """All ranks of the model."""

    train_stage = "train"  # the name of an optimizer step's time limit

    async def train(self, parts: Sequence[DataProto], objective: TrainingSettings, step: int) -> dict[str, Metric]:
        """Take one optimizer step on the rows of each rank, and return the metrics, merged over ranks.

        Rows that the objective compares are on the same rank.
        """
        return await self._on_all("train", parts, objective, step, self.train_stage)

    async def evaluate(self, parts: Sequence[DataProto], objective: TrainingSettings, step: int) -> dict[str, Metric]:
        """The metrics of rows, merged over ranks, without a step. Takes the arguments of `train`."""
        return await self._on_all("evaluate", parts, objective, step, "evaluate")

    async def _on_all(
        self, method: str, parts: Sequence[DataProto], objective: TrainingSettings, step: int, stage: str
    ) -> dict[str, Metric]:
        handles = [DataProtoRef.put(part) if len(part) else DataProtoRef() for part in parts]
        submit = self.workers.submit
        calls = [submit(rank, stage, method, handle, objective, step) for rank, handle in enumerate(handles)]
        return merge_metrics(await self.workers.answers(calls))
