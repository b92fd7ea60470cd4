"""Holds the first checkpoint against the room on the disk of the run's folder, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_dist.checks.earlier_runs import is_finished
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.engines.train.durable_files import free_bytes
from grpo_dist.errors import ConfigError
from grpo_dist.plan.memory import RoleMemory
from grpo_dist.sizes import GIB
from grpo_dist.trainer.checkpoint.folder import leftovers


def check_disk(config: JobConfig, roles: Sequence[RoleMemory], steps: int) -> str:
    """Check that the first checkpoint fits on the disk; every later one is asked again before it is written.

    Args:
        config: the run's config.
        roles: what each role writes.
        steps: training steps of the run.

    Returns:
        The room in a few words, for a dry run; "" if the run writes no checkpoint.

    Raises:
        ConfigError: it does not fit.
    """
    trainer, run_dir = config.trainer, Path(config.trainer.default_local_dir).absolute()
    saves = trainer.save_freq > 0 or trainer.save_interval_minutes is not None
    if trainer.val_only or not saves or not roles or is_finished(config, steps):
        return ""
    left = (path for folder in leftovers(run_dir) for path in folder.rglob("*") if path.is_file())  # removed first
    room = (free_bytes(run_dir) + sum(path.stat().st_size for path in left)) / GIB
    size = sum(role.saved for role in roles)
    if size > room:
        key = "trainer.default_local_dir"
        raise ConfigError(
            f"{key}={trainer.default_local_dir}: a checkpoint needs {size:.3g} GiB, and {room:.3g} GiB are free. Make "
            f"room, or set {key} to a folder on a larger disk"
        )
    return f"disk: {room:.3g} GiB free; a checkpoint takes {size:.3g} GiB"
