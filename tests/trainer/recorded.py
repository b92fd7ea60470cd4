"""What a trainer has told its trackers."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_dist.tracking.base import Trackers
from grpo_dist.trainer.trainer import GRPOTrainer


class Rows:
    """A tracker that keeps the rows."""

    note = "rows"

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append({"step": step, **metrics})

    def close(self) -> None: ...


def record(trainer: GRPOTrainer) -> GRPOTrainer:
    """The trainer, which keeps its rows from now on."""
    trainer.trackers = Trackers({"rows": Rows()}, resumed_step=None)
    return trainer


def history(trainer: GRPOTrainer) -> list[dict[str, float]]:
    """The rows of a trainer that is `record`ed."""
    rows = trainer.trackers._active["rows"]
    assert isinstance(rows, Rows)
    return rows.rows
