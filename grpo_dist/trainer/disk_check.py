"""Holds what a run will write against the room on the disk of its folder, before anything starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_dist.config.memory import RoleMemory
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
    """Check that a checkpoint fits, or the model of a run without checkpoints; note what will not fit later.

    Args:
        config: the run's config.
        roles: what each role writes; None: the model's sizes are unknown, and nothing is checked.
        ready: the training steps; gets the note.
        tell: called with a line for a dry run.

    Raises:
        ConfigError: the run could not write what it writes first.
    """
    trainer = config.trainer
    if roles is None or trainer.val_only or is_finished(config, ready.steps):
        return
    run_dir = Path(trainer.default_local_dir).absolute()
    room = (free_bytes(run_dir) + _to_be_removed(run_dir)) / GIB
    checkpoint = sum(role.saved for role in roles)
    model = sum(role.exported for role in roles) if trainer.export_hf_model else 0.0
    saves = _saves(config, run_dir, ready.steps)
    here = f"{_DIR}={trainer.default_local_dir}"
    if saves and checkpoint > room:
        raise ConfigError(
            f"{here}: a checkpoint needs {checkpoint:.3g} GiB, and {room:.3g} GiB are free there. Make room, or set "
            f"{_DIR} to a folder on a larger disk"
        )
    if not saves and model > room:
        raise ConfigError(
            f"{here}: the trained model needs {model:.3g} GiB, and {room:.3g} GiB are free there. Make room, set "
            f"{_DIR} to a folder on a larger disk, or trainer.export_hf_model=false"
        )
    there = len(checkpoints(run_dir))
    kept = (
        math.inf if (keep := trainer.max_actor_ckpt_to_keep) is None else keep + (trainer.keep_best_metric is not None)
    )
    most, last = (min(limit, there + saves) for limit in (kept + 1, kept))  # one more while it is written
    needed = max((most - there) * checkpoint, (last - there) * checkpoint + model)
    tell(f"disk: {room:.3g} GiB free; a checkpoint takes {checkpoint:.3g} GiB, the model {model:.3g} GiB")
    if needed > room:
        ready.notes.append(
            f"{here}: {room:.3g} GiB are free there, and the run will need {needed:.3g} GiB: at most {most:g} "
            f"checkpoints of {checkpoint:.3g} GiB ({_KEEP}={'null' if keep is None else keep}, and one that is being "
            f"written; {there} are there), and the model of {model:.3g} GiB. It ends when the disk is full: make room, "
            f"or lower {_KEEP}"
        )


def _saves(config: JobConfig, run_dir: Path, steps: int) -> float:
    """How many checkpoints the run will write, at most; those of signals do not count."""
    trainer, last = config.trainer, None
    if trainer.resume_mode != "disable":
        last = last_checkpoint(run_dir)
    left = steps - (int(last.name.rpartition("_")[2]) if last is not None else 0)
    if trainer.save_interval_minutes is not None:
        return left
    return math.ceil(left / trainer.save_freq) if trainer.save_freq > 0 else 0


def _to_be_removed(run_dir: Path) -> int:
    """Bytes of what a killed run has left, which a run removes before it writes."""
    files = (path for folder in leftovers(run_dir) for path in folder.rglob("*") if path.is_file())
    return sum(path.stat().st_blocks * 512 for path in files)
