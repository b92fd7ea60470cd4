"""Resuming from a checkpoint: finds it, checks it against the config, and has the roles load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_dist.config.schema_job import JobConfig
from grpo_dist.trainer.checkpoint.config_changes import check_changes, digest_code
from grpo_dist.trainer.checkpoint.finished_groups import Group, read_finished
from grpo_dist.trainer.checkpoint.folder import RunState, clear_leftovers, find_checkpoint, forget_last, read_state
from grpo_dist.trainer.roles import Roles


@dataclass(frozen=True)
class Resumed:
    """A checkpoint from which a run resumes.

    Attributes:
        folder: the checkpoint's folder.
        state: the state of the run when it was written.
        changes: changes of the config since then, as lines "key: old -> new".
    """

    folder: Path
    state: RunState
    changes: Sequence[str]


def find_resumed(config: JobConfig, prompts: Mapping[str, Any]) -> Resumed | None:
    """Find the checkpoint to resume from, without loading it; None if there is none, or the config says not to.

    Args:
        config: the current config.
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
    changes = check_changes(folder, state, config, prompts, digest_code(config))
    if changes and (num_groups := sum(len(each["rows"]) for each in state.finished)):
        changes.append(f"so {num_groups} finished groups of coming steps are not used, but sampled again")
    return Resumed(folder, state, changes)


async def load_checkpoint(
    resumed: Resumed, roles: Roles, *, exact_kl: bool, has_teacher: bool = False
) -> dict[str, Group]:
    """Have the actor, the critic, a reference that has moved and a retrained reward model load their shards.

    Args:
        resumed: the checkpoint.
        roles: started workers.
        exact_kl: whether the loss needs the reference's output layer.
        has_teacher: whether the reference is a teacher, which takes the place of one that has moved.

    Returns:
        The finished groups of later steps, by uid; none if the config has changed.

    Raises:
        CheckpointError: the shards do not fit the model, or cannot be read.
    """
    folder = resumed.folder.absolute()
    await roles.actor.load_checkpoint(str(folder / "actor"))
    if roles.critic is not None:
        await roles.critic.load_checkpoint(str(folder / "critic"))
    if roles.reward_model is not None and (folder / "reward_model").is_dir():
        await roles.reward_model.load_checkpoint(str(folder / "reward_model"))
    if roles.ref is not None and not has_teacher and (folder / "ref").is_dir():
        await roles.ref.load_checkpoint(str(folder / "ref"))
        if exact_kl:
            await roles.actor.take_reference_head(roles.ref)
    return {} if resumed.changes else await read_finished(folder, resumed.state.finished, roles.reward)
