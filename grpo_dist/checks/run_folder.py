"""The checks before Ray starts of the run's folder: its checkpoint to resume from, whether all is done, its disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_dist.assets.model_folder import ADAPTER_FOLDER, read_usage
from grpo_dist.config.keys import value_of
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.engines.train.durable_files import free_bytes
from grpo_dist.errors import CheckpointError, ConfigError, DataError
from grpo_dist.plan.commands import command_of
from grpo_dist.plan.memory import RoleMemory
from grpo_dist.sizes import GIB
from grpo_dist.tracking.metric_names import why_it_ends
from grpo_dist.trainer.checkpoint.config_changes import (
    another_place,
    check_changes,
    digest_code,
    find_changes,
    read_config,
    told,
)
from grpo_dist.trainer.checkpoint.folder import (
    RunState,
    find_checkpoint,
    is_model_of,
    last_checkpoint,
    leftovers,
    read_state,
)
from grpo_dist.trainer.record import EXPORTED


def check_resume(config: JobConfig, identity: Mapping[str, Any], steps: int, *, verify: bool) -> str:
    """Check that config and rows fit the checkpoint to resume from; with `verify` its files are checked too.

    Args:
        identity: number and fingerprint of the training rows.

    Returns:
        The checkpoint in a few words, for a dry run; "" if there is none.

    Raises:
        CheckpointError: it does not fit, or there are checkpoints but none is intact.
        ConfigError: the run goes on with another config (resume_mode=force), and no step is left to train with it; or
            it starts anew, and would replace the model of another experiment.
    """
    trainer, run_dir = config.trainer, Path(config.trainer.default_local_dir).absolute()
    if trainer.resume_mode == "disable":
        return ""
    if verify:
        folder = find_checkpoint(run_dir, trainer.resume_mode, trainer.resume_from_path)
    else:
        named = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
        folder = Path(named) if named is not None else last_checkpoint(run_dir)
    if folder is None:
        _check_model(config, run_dir)
        return ""
    try:
        state = read_state(folder)
        read_config(folder)
    except CheckpointError:
        if verify:
            raise
        return ""  # damaged: the run will look for an earlier one
    changes = check_changes(folder, state, config, identity, digest_code(config, state.code))
    if changes and trainer.resume_mode == "force" and _is_trained(config, state, steps) and not trainer.val_only:
        listed = "\n".join(f"  {line}" for line in changes)
        raise ConfigError(
            f"trainer.resume_mode=force: nothing is left to train with these changes, since {folder} is at step "
            f"{state.step} of {steps}:\n{listed}\nRaise trainer.total_training_steps or trainer.total_epochs, "
            "or set trainer.stop_at to another value"
        )
    text = nothing_to_train(config, steps) if is_finished(config, steps) else f"checkpoint to resume from: {folder}"
    return "\n".join([text, *told(changes)])


def _check_model(config: JobConfig, run_dir: Path) -> None:
    """Check that a run that starts anew replaces no model of another experiment that has left no checkpoint."""
    trainer = config.trainer
    if trainer.resume_mode != "auto" or trainer.val_only or not (run_dir / EXPORTED).is_dir():
        return
    try:
        changes = find_changes(run_dir, config)
    except CheckpointError:
        return  # no record of what the model is of
    if differing := [*changes.experiment, *changes.refused]:
        listed = "\n".join(f"  {line}" for line in differing)
        raise ConfigError(
            f"{run_dir / EXPORTED} is the model of another experiment, and this run would replace it. These have "
            f"changed:\n{listed}\nFor a run of its own, set {another_place(config)}. To replace the model, set "
            "trainer.resume_mode=disable."
        )


def is_finished(config: JobConfig, steps: int) -> bool:
    """Tell if an earlier start of this run, which `check_resume` has accepted, has trained all steps, and written the
    model if that is asked for.
    """
    trainer, run_dir = config.trainer, Path(config.trainer.default_local_dir)
    folder = last_checkpoint(run_dir)
    if trainer.val_only or trainer.resume_mode not in ("auto", "force") or folder is None:
        return False
    exported, lora = [EXPORTED] if trainer.export_hf_model else [], command_of(config).lora_section
    if exported and lora and value_of(config, lora).trains_factors:
        exported.append(ADAPTER_FOLDER)
    try:
        return _is_trained(config, read_state(folder), steps) and all(
            is_model_of(run_dir / name, folder) and read_usage(run_dir / name).dtype == config.export_dtype
            for name in exported
        )
    except (CheckpointError, DataError):  # damaged: it is written again
        return False


def _is_trained(config: JobConfig, state: RunState, steps: int) -> bool:
    """Tell if no step is left after a checkpoint: there are no more, or its validation has reached `stop_at`."""
    return state.step >= steps or bool(why_it_ends(config.trainer.stop_at, state.metrics))


def nothing_to_train(config: JobConfig, steps: int) -> str:
    """Say that the run is finished: where its results are, and how to train longer."""
    trainer, run_dir = config.trainer, Path(config.trainer.default_local_dir).absolute()
    folder = last_checkpoint(run_dir)
    assert folder is not None, "the run is finished"
    state = read_state(folder)
    step, why = min(state.step, steps), why_it_ends(trainer.stop_at, state.metrics)
    where = f"its last checkpoint is at step {step} of {steps}{f': {why}' if why else ''}"
    lines = [f"Nothing to train: this run has finished, {where}.", f"  checkpoint  {folder}"]
    if trainer.export_hf_model:
        lines.append(f"  model       {run_dir / EXPORTED}")
    key = "trainer.total_epochs" if trainer.total_training_steps is None else "trainer.total_training_steps"
    key = "the value of trainer.stop_at" if step < steps else key
    lines.append(f"To train longer, raise {key}. For another run, set trainer.experiment_name to another name.")
    return "\n".join(lines)


def check_disk(config: JobConfig, roles: Sequence[RoleMemory], steps: int) -> str:
    """Check that the first checkpoint fits on the disk; every later one is asked again before it is written.

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
