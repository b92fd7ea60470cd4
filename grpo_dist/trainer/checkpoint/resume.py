"""Resuming from a checkpoint: finds it, checks it against the config, and has the roles load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_dist.config.schema_job import JobConfig
from grpo_dist.plan.roles import roles_of
from grpo_dist.trainer.checkpoint.config_changes import check_changes, digest_code
from grpo_dist.trainer.checkpoint.folder import RunState, clear_leftovers, find_checkpoint, forget_last, read_state
from grpo_dist.workers.gang import Gang


@dataclass(frozen=True)
class Resumed:
    """A checkpoint from which a run resumes.

    Attributes:
        changes: changes of the config since then, as lines "key: old -> new".
    """

    folder: Path
    state: RunState
    changes: Sequence[str]


def find_resumed(config: JobConfig, prompts: Mapping[str, Any]) -> Resumed | None:
    """Find the checkpoint to resume from, without loading it; None if there is none, or the config says not to.

    Args:
        prompts: number and fingerprint of the current training rows.

    Raises:
        CheckpointError: there are checkpoints but none is intact, or the config does not fit.
    """
    trainer = config.trainer
    run_dir = Path(trainer.default_local_dir)
    if not trainer.val_only:  # the run that these checkpoints are of may be at work
        clear_leftovers(run_dir)
    folder = find_checkpoint(run_dir, trainer.resume_mode, trainer.resume_from_path)
    if folder is None:
        if not trainer.val_only:
            forget_last(run_dir)
        return None
    state = read_state(folder)
    changes = check_changes(folder, state, config, prompts, digest_code(config, state.code))
    if changes and (num_groups := sum(len(description["rows"]) for description in state.finished)):
        changes.append(f"so {num_groups} finished groups of coming steps are not used, but sampled again")
    return Resumed(folder, state, changes)


async def load_checkpoint(resumed: Resumed, config: JobConfig, gangs: Mapping[str, Gang]) -> None:
    """Have the roles load their shards: those that train, and others of which the checkpoint has some.

    Raises:
        CheckpointError: the shards do not fit the model, or cannot be read.
    """
    for row in roles_of(config):
        folder = resumed.folder.absolute() / row.name
        if row.name in gangs and (row.trains or (folder.is_dir() and row.resumes(config))):
            await gangs[row.name].load_checkpoint(str(folder))
