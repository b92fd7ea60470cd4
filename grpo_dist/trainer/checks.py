"""Checks that the commands share before Ray starts, and how the errors of all checks become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_dist.assets import BUILTIN
from grpo_dist.assets.adapter_folder import ADAPTER_FOLDER, check_base, read_adapter_folder
from grpo_dist.assets.model_folder import ModelFolder
from grpo_dist.assets.paths import is_folder
from grpo_dist.assets.usage import read_usage
from grpo_dist.config.adapter import ADAPTER_KEY
from grpo_dist.config.node_layout import Slot
from grpo_dist.config.problems import value_of
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.errors import CheckpointError, ConfigError, DataError, GrpoDistError
from grpo_dist.tracking.base import check_trackers
from grpo_dist.trainer.checkpoint.change_rules import command_of
from grpo_dist.trainer.checkpoint.config_changes import (
    another_place,
    check_changes,
    digest_code,
    find_changes,
    read_config,
)
from grpo_dist.trainer.checkpoint.folder import find_checkpoint, last_checkpoint, read_state
from grpo_dist.trainer.checkpoint.identity import is_model_of
from grpo_dist.trainer.machine import Machine, check_machine
from grpo_dist.trainer.record import ALL_TRACKERS, EXPORTED
from grpo_dist.trainer.run_lock import check_run_dir


@dataclass(frozen=True)
class Ready:
    """The result of the checks.

    Attributes:
        notes: for the user.
        steps: number of training steps.
        again: whether the run starts its workers again, after one of them was lost.
    """

    notes: list[str]
    steps: int
    again: bool = field(default=False, kw_only=True)


class Checks:
    """Collects the errors of the checks, each of which runs in its own `with` block."""

    def __init__(self) -> None:
        self.found: list[GrpoDistError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if isinstance(error, GrpoDistError) and str(error) not in map(str, self.found):
            self.found.append(error)
        return isinstance(error, GrpoDistError)

    def end(self) -> None:
        """Raise all collected errors as one."""
        if len(self.found) == 1:
            (error,) = self.found
            raise (error if isinstance(error, ConfigError) else ConfigError(str(error))) from None
        if self.found:
            listed = "\n  ".join(str(error) for error in self.found)
            raise ConfigError(f"the run has {len(self.found)} problems:\n  {listed}")


def check_place(config: JobConfig, slots: Sequence[Slot], checks: Checks, tell: Callable[[str], None]) -> Machine:
    """Check the machine, the trackers and the run's folder.

    Args:
        config: the run's config.
        slots: what the run takes of the machine.
        checks: collects what is wrong.
        tell: called with a line for each check that passed.

    Returns:
        The machine or cluster; without figures if it is not usable.
    """
    machine = Machine("", None)
    with checks:
        machine = check_machine(config, slots)
        tell(machine.found)
    with checks:
        check_trackers(config.trainer.logger, ALL_TRACKERS)
        check_run_dir(config.trainer.record_dir.absolute())
        tell(f"run directory: {config.trainer.record_dir}")
    return machine


def is_on_the_hub(path: str) -> bool:
    """Whether a model must be downloaded, unless it is in the cache."""
    return not (path.startswith(BUILTIN) or is_folder(path))


def describe_model(model: ModelFolder) -> str:
    """A model folder in a few words, for a dry run."""
    files = f"{len(model.shapes)} tensors in {model.num_files} file" + ("s" if model.num_files > 1 else "")
    weights = files if model.shapes else "its weights are downloaded when the run starts"
    return f"{model.model_type}, {weights}"


def check_adapter(section: str, path: str | None, model: ModelFolder) -> str:
    """Check the adapter from which LoRA goes on against the weights of its model, if they are at hand.

    Args:
        section: the section with LoRA's keys.
        path: of the adapter; None: there is none.
        model: its base.

    Returns:
        The adapter in a few words, for a dry run; "" if there is none.

    Raises:
        DataError: it is unusable, or belongs to another model.
    """
    if path is None:
        return ""
    setting = f"{section}.{ADAPTER_KEY}={path}"
    adapter = read_adapter_folder(path, setting)
    if model.shapes:
        check_base(adapter, model.shapes, setting)
    return f"goes on from {path}: rank {adapter.rank}, alpha {adapter.alpha:g}, {len(adapter.layers)} layers"


def check_resume(config: JobConfig, identity: Mapping[str, Any], steps: int, *, verify: bool) -> str:
    """Check that config and rows fit the checkpoint to resume from; with `verify` its files are checked too.

    Args:
        config: the run's config.
        identity: number and fingerprint of the training rows.
        steps: training steps of the run.
        verify: whether to check the files.

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
    changes = check_changes(folder, state, config, identity, digest_code(config))
    if changes and trainer.resume_mode == "force" and state.step >= steps and not trainer.val_only:
        listed = "\n".join(f"  {line}" for line in changes)
        raise ConfigError(
            f"trainer.resume_mode=force: nothing is left to train with these changes, since {folder} is at step "
            f"{state.step} of {steps}:\n{listed}\nRaise trainer.total_training_steps or trainer.total_epochs"
        )
    return nothing_to_train(config, steps) if is_finished(config, steps) else f"checkpoint to resume from: {folder}"


def _check_model(config: JobConfig, run_dir: Path) -> None:
    """Check that a run that starts anew does not replace the model of another experiment, which has left no checkpoint.

    Raises:
        ConfigError: it does.
    """
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
    """Whether an earlier start of this run has trained all steps, and written the model if that is asked for.

    Args:
        config: a config that `check_resume` has accepted.
        steps: training steps of the run.
    """
    trainer, run_dir = config.trainer, Path(config.trainer.default_local_dir)
    folder = last_checkpoint(run_dir)
    if trainer.val_only or trainer.resume_mode not in ("auto", "force") or folder is None:
        return False
    exported, lora = [EXPORTED] if trainer.export_hf_model else [], command_of(config).lora_section
    if exported and lora and value_of(config, f"{lora}.lora_rank"):
        exported.append(ADAPTER_FOLDER)
    try:
        return read_state(folder).step >= steps and all(
            is_model_of(run_dir / name, folder) and read_usage(run_dir / name).dtype == config.export_dtype
            for name in exported
        )
    except (CheckpointError, DataError):  # damaged: it is written again
        return False


def nothing_to_train(config: JobConfig, steps: int) -> str:
    """What a run says that finds itself finished: where its results are, and how to train longer."""
    trainer, run_dir = config.trainer, Path(config.trainer.default_local_dir).absolute()
    lines = [f"Nothing to train: this run has finished, its last checkpoint is at step {steps} of {steps}."]
    lines.append(f"  checkpoint  {last_checkpoint(run_dir)}")
    if trainer.export_hf_model:
        lines.append(f"  model       {run_dir / EXPORTED}")
    key = "trainer.total_epochs" if trainer.total_training_steps is None else "trainer.total_training_steps"
    lines.append(f"To train longer, raise {key}. For another run, set trainer.experiment_name to another name.")
    return "\n".join(lines)
