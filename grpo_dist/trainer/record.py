"""What a run shows and writes down: messages, the display, trackers, the run directory and its config."""

from __future__ import annotations

import sys
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_dist.config.environment import recorded
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.terminal import show
from grpo_dist.tracking.base import TRACKERS, Trackers, build_trackers, restore_tracker_ids
from grpo_dist.tracking.console import Progress
from grpo_dist.trainer.checkpoint.config_changes import saved_config
from grpo_dist.trainer.run_lock import writing_into

if TYPE_CHECKING:  # it imports Ray, which must not be imported before the run connects
    from grpo_dist.trainer.checkpoint.resume import Resumed

RESOLVED_CONFIG = "config.yaml"
ALL_TRACKERS = TRACKERS | {"prometheus": "grpo_dist.trainer.prometheus:PrometheusTracker"}
"""`TRACKERS`, and the one that needs Ray."""

EXPORTED = "huggingface"
"""The folder of the trained model."""


def say(config: JobConfig, text: str) -> None:
    """Show a message before and after there is a display."""
    if config.trainer.console:
        show(text + "\n", sys.stderr)


def make_run_dir(config: JobConfig) -> Path:
    """Make the folder of the record; returns its absolute path."""
    run_dir = config.trainer.record_dir.absolute()
    with writing_into(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def write_config(config: JobConfig, run_dir: Path) -> None:
    """Write the resolved config, without secrets, into the run directory.

    No other start of a run writes the same file, so its digest says which one has exported a model.
    """
    temporary = run_dir / f"{RESOLVED_CONFIG}.tmp"
    with writing_into(run_dir):
        text = f"# start {uuid.uuid4().hex} of this run\n{saved_config(config)}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(run_dir / RESOLVED_CONFIG)


def open_record(
    config: JobConfig, run_dir: Path, resumed: Resumed | None, steps: int, stack: ExitStack
) -> tuple[Progress, Trackers]:
    """The display and the trackers of this run, or those of the run that it resumes; closed with `stack`."""
    first = resumed.state.step if resumed is not None else 0
    stream = sys.stderr if config.trainer.console else None
    progress = stack.enter_context(Progress(steps, first, stream))
    resumed_step = None
    if resumed is not None:
        restore_tracker_ids(Path(config.trainer.default_local_dir), resumed.state.trackers)
        resumed_step = None if config.trainer.val_only else resumed.state.step
    trackers = stack.enter_context(
        build_trackers(
            config.trainer.logger,
            run_dir=run_dir,
            project_name=config.trainer.project_name,
            experiment_name=config.trainer.experiment_name,
            config=recorded(config, config.model_dump(mode="json")),
            resumed_step=resumed_step,
            classes=ALL_TRACKERS,
        )
    )
    for note in [*_resume_notes(config, resumed, steps), *trackers.notes]:
        progress.message(note)
    return progress, trackers


def _resume_notes(config: JobConfig, resumed: Resumed | None, steps: int) -> list[str]:
    """Messages about the checkpoint from which the run resumes."""
    if resumed is None:
        return []
    notes = [f"resumed from {resumed.folder}"]
    if resumed.changes:
        notes.append("\n  ".join(["the config has changed since then:", *resumed.changes]))
    if resumed.state.step >= steps and not config.trainer.val_only:
        exported = "; the model is exported" if config.trainer.export_hf_model else ""
        notes.append(
            f"nothing to train: it is at step {resumed.state.step} of {steps}{exported}. For more, raise "
            "trainer.total_training_steps; for a new run, set trainer.experiment_name or resume_mode=disable"
        )
    return notes
