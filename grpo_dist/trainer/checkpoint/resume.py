"""A run's state into a checkpoint, and out of it again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_dist.tracking.base import WANDB_RUN_ID
from grpo_dist.trainer.checkpoint.config_changes import check_changes
from grpo_dist.trainer.checkpoint.finished_groups import FinishedGroups, read_finished
from grpo_dist.trainer.checkpoint.folder import RunState, clear_leftovers, find_checkpoint, read_state

if TYPE_CHECKING:
    from grpo_dist.trainer.trainer import GRPOTrainer


def run_state(trainer: GRPOTrainer) -> tuple[RunState, list[FinishedGroups]]:
    """Where the run is, and the finished groups of coming steps; both of the same moment."""
    groups = trainer.sampler.finished_groups()
    state = RunState(
        step=trainer.step,
        weight_version=trainer.weight_version,
        sampler=trainer.prompts.sampler.state_dict(),
        kl_coef=trainer.kl_controller.coef,
        ledger=trainer.sampler.state_dict(),
        prompts=trainer.prompts.identity,
        code=trainer.code,
        metrics=trainer.validated,
        trackers=tracker_ids(trainer.run_dir),
        finished=[each.describe() for each in groups],
    )
    return state, groups


async def resume(trainer: GRPOTrainer) -> Path | None:
    """Go on from a checkpoint, if the config and the run directory say so.

    Returns:
        Its folder; `trainer.changes` then tells, key by key, what the config has otherwise.

    Raises:
        CheckpointError: there are checkpoints, and none is whole, or the config does not fit.
    """
    config, roles = trainer.config.trainer, trainer.roles
    if not config.val_only:  # the run that these checkpoints are of may be at work
        clear_leftovers(trainer.run_dir)
    folder = find_checkpoint(trainer.run_dir, config.resume_mode, config.resume_from_path)
    if folder is None:
        return None
    state, where = read_state(folder), folder.absolute()
    trainer.changes = check_changes(folder, state, trainer.config, trainer.prompts.identity, trainer.code)
    await roles.actor.load_checkpoint(str(where / "actor"))
    if roles.ref is not None and (where / "ref").is_dir():
        await roles.ref.load_checkpoint(str(where / "ref"))
        await trainer.refresh_reference_head()
    trainer.prompts.sampler.load_state_dict(state.sampler)
    trainer.sampler.load_state_dict(state.ledger)
    if not trainer.changes:
        trainer.sampler.restored = await read_finished(where, state.finished, roles.reward)
    elif num_groups := sum(len(each["rows"]) for each in state.finished):
        trainer.changes.append(f"so {num_groups} finished groups of coming steps are not used, but sampled again")
    trainer.step, trainer.weight_version = state.step, state.weight_version - 1
    trainer.saver.resumed_from(folder, state.step)
    if trainer.kl_controller.target_kl is not None:
        trainer.kl_controller.coef = state.kl_coef
    restore_tracker_ids(trainer.run_dir, state.trackers)
    return folder


def tracker_ids(run_dir: Path) -> dict[str, str]:
    """The ids under which trackers know this run."""
    file = run_dir / WANDB_RUN_ID
    return {"wandb": file.read_text().strip()} if file.is_file() else {}


def restore_tracker_ids(run_dir: Path, ids: Mapping[str, str]) -> None:
    """Have trackers that start from now on go on under these ids."""
    if "wandb" in ids:
        file = run_dir / WANDB_RUN_ID
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(ids["wandb"] + "\n")
