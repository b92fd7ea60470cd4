"""What a trainer has told its trackers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_dist.config.schema import RunConfig
from grpo_dist.plan.plan import Plan
from grpo_dist.run.build import restore_roles
from grpo_dist.tracking.base import Tracker, Trackers
from grpo_dist.tracking.summary import Progress
from grpo_dist.trainer.checkpoint.saver import find_resumed
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.run_prompts import Prompts
from grpo_dist.trainer.trainer import GRPOTrainer
from grpo_dist.workers.roles import Roles
from tests.records import json_lines


class Rows(Tracker):
    """A tracker that keeps the rows."""

    note = "rows"

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append({"step": step, **metrics})

    def close(self) -> None: ...


def recorded_trainer(plan: Plan[RunConfig], roles: Roles, prompts: Prompts) -> GRPOTrainer:
    """A trainer that keeps its rows; it goes on from a checkpoint where the config says so."""
    resumed = find_resumed(plan.config, prompts.identity)
    finished, trackers = restore_roles(plan, roles, resumed), Trackers({"rows": Rows()}, resumed_step=None)
    trainer = GRPOTrainer(plan, roles, prompts, trackers, Progress(plan.steps, 0, None), Preemption())
    if resumed is not None:
        trainer.restore(resumed, finished)
    return trainer


def history(trainer: GRPOTrainer) -> list[dict[str, float]]:
    """The rows of a `recorded_trainer`."""
    rows = trainer.trackers._active["rows"]
    assert isinstance(rows, Rows)
    return rows.rows


def shown_by(trainer: GRPOTrainer) -> list[str]:
    """What it will tell the user."""
    shown: list[str] = []
    trainer.progress.message = shown.append  # type: ignore[method-assign]
    return shown


def trained_rows(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The responses of a step, as its run has written them."""
    return json_lines(run_dir / f"rollouts/{step}.jsonl")
