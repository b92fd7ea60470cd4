"""Holds what a run will write against the room on the disk of its folder, before anything starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_dist.config.memory import RoleMemory
from grpo_dist.config.problems import shown
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.engines.train.durable_files import free_bytes
from grpo_dist.errors import ConfigError
from grpo_dist.sizes import GIB
from grpo_dist.trainer.checkpoint.folder import checkpoints, last_checkpoint, leftovers
from grpo_dist.trainer.checks import Ready, is_finished

_DIR, _KEEP = "trainer.default_local_dir", "trainer.max_actor_ckpt_to_keep"


def check_disk(
    config: JobConfig, roles: Sequence[RoleMemory] | None, ready: Ready, tell: Callable[[str], None]
) -> None:
    """Check that there is room for the first thing that the run writes, and note it if there is too little for all.

    Args:
        config: the run's config.
        roles: what each role writes; None: the sizes of the model are unknown, so nothing is checked.
        ready: has the number of training steps, and gets the note.
        tell: called with a line for a dry run.

    Raises:
        ConfigError: there is no room for a checkpoint, or for the model of a run that writes no checkpoints.
    """
    trainer = config.trainer
    if roles is None or trainer.val_only or is_finished(config, ready.steps):
        return
    run_dir = Path(trainer.default_local_dir).absolute()
    room = (free_bytes(run_dir) + _bytes_to_be_removed(run_dir)) / GIB
    checkpoint = sum(role.saved for role in roles)
    model = sum(role.exported for role in roles) if trainer.export_hf_model else 0.0
    saves, there = _num_saves(config, run_dir, ready.steps), len(checkpoints(run_dir))
    what, size, way = (
        ("a checkpoint", checkpoint, "") if saves else ("the model", model, "trainer.export_hf_model=false")
    )
    key = f"{_DIR}={trainer.default_local_dir}"
    if size > room:
        ways = ", or set ".join(filter(None, (f"{_DIR} to a folder on a larger disk", way)))
        raise ConfigError(f"{key}: {what} needs {size:.3g} GiB, and {room:.3g} GiB are free. Make room, set {ways}")
    tell(f"disk: {room:.3g} GiB free; a checkpoint takes {checkpoint:.3g} GiB, the model {model:.3g} GiB")
    kept = _num_kept(config)
    most, at_end = min(kept + 1, there + saves), min(kept, there + saves)  # one more while it is written
    needed = max((most - there) * checkpoint, (at_end - there) * checkpoint + model)
    if needed > room:
        ready.notes.append(
            f"{key}: the run needs {needed:.3g} GiB, {room:.3g} GiB are free, and it ends where the disk is full. "
            f"{_KEEP}={shown(trainer.max_actor_ckpt_to_keep)}: up to {most:g} checkpoints of {checkpoint:.3g} GiB at "
            f"once ({there} are there), and a model of {model:.3g} GiB at the end. Make room, or lower {_KEEP}"
        )
        tell(ready.notes[-1])


def _num_saves(config: JobConfig, run_dir: Path, steps: int) -> int:
    """The most checkpoints that the run will write, without those of signals."""
    trainer = config.trainer
    last = last_checkpoint(run_dir) if trainer.resume_mode != "disable" else None
    left = steps if last is None else steps - int(last.name.rpartition("_")[2])
    if trainer.save_interval_minutes is not None:
        return left
    return math.ceil(left / trainer.save_freq) if trainer.save_freq > 0 else 0


def _num_kept(config: JobConfig) -> float:
    """Checkpoints that the run keeps."""
    newest = config.trainer.max_actor_ckpt_to_keep
    return math.inf if newest is None else newest + (config.trainer.keep_best_metric is not None)


def _bytes_to_be_removed(run_dir: Path) -> int:
    """Of what a killed run has left, which the run removes first."""
    files = (path for folder in leftovers(run_dir) for path in folder.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files)
