"""All checks of a job that are possible before Ray starts; `trainer.dry_run=true` ends after them.

All of them run, so that one attempt reports everything that is wrong. Imports neither Ray nor vLLM. Of a running
cluster only its address is checked; its resources are known only once Ray has connected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from grpo_dist.agents.gateway import socket_at
from grpo_dist.assets import check_push, is_on_the_hub
from grpo_dist.assets.model_folder import ADAPTER_FOLDER, ModelFolder, overridden, read_usage
from grpo_dist.checks import models
from grpo_dist.checks.models import REWARD_MODEL, CheckedModel
from grpo_dist.checks.own_code import import_reward, own_functions, resolve_names, try_sampler
from grpo_dist.config.keys import Problem, config_error, value_of
from grpo_dist.config.processor import logical_cpus, memory_gib
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.engines.rendezvous import LOOPBACK
from grpo_dist.engines.train.durable_files import free_bytes
from grpo_dist.errors import CheckpointError, ConfigError, DataError, GrpoDistError
from grpo_dist.plan.commands import command_of
from grpo_dist.plan.memory import RoleMemory, memory_estimate, memory_problems
from grpo_dist.plan.model_rules import model_problems, position_problems
from grpo_dist.plan.placement import Slot, slots
from grpo_dist.plan.roles import POLICY, Role, engine_dtype, optimizer_key, roles_of
from grpo_dist.plan.rules import engine_of
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.rewards.contract import RowNeeds
from grpo_dist.runtime.cluster import LOCAL, find_cluster
from grpo_dist.sizes import GIB
from grpo_dist.tracking.base import check_trackers
from grpo_dist.tracking.metric_names import SUPERVISED_VALIDATION, require_metrics, why_it_ends
from grpo_dist.trainer.checkpoint import config_changes
from grpo_dist.trainer.checkpoint.folder import find_checkpoint, is_model_of, last_checkpoint, leftovers, read_state
from grpo_dist.trainer.record import EXPORTED, check_run_dir

Data = TypeVar("Data")


@dataclass(frozen=True)
class Ready(Generic[Data]):
    """The result of the checks.

    Attributes:
        data: what the run trains on, with `identity`, and `counts` of its rows in a line.
        again: whether the run starts its workers again, after one of them was lost.
    """

    data: Data
    steps: int
    notes: list[str]
    again: bool = field(default=False, kw_only=True)


class Checks:
    """Collects the errors of the checks, each of which runs in its own `with` block."""

    def __init__(self) -> None:
        self.errors: list[GrpoDistError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if isinstance(error, GrpoDistError) and str(error) not in map(str, self.errors):
            self.errors.append(error)
        return isinstance(error, GrpoDistError)

    def end(self) -> None:
        """Raise all collected errors as one."""
        if len(self.errors) == 1:
            (error,) = self.errors
            raise (error if isinstance(error, ConfigError) else ConfigError(str(error))) from None
        if self.errors:
            listed = "\n  ".join(str(error) for error in self.errors)
            raise ConfigError(f"the run has {len(self.errors)} problems:\n  {listed}")


def check_all(config: JobConfig, tell: Callable[[str], None], *, dry_run: bool) -> Ready[Any]:
    """Check everything that a run needs, including all files that it reads.

    Args:
        tell: called with a line for each check that passed.
        dry_run: whether this is a dry run: weights are not downloaded from the hub, and the checkpoint to resume from
            is fully verified, which a run does later, when it loads it.

    Raises:
        ConfigError: everything that is wrong, in one message.
    """
    checks, machine, ready = Checks(), Machine("", None), None
    with checks:
        machine = check_machine(config, slots(config))
        tell(machine.description)
    with checks:
        check_trackers(config.trainer.logger, config.trainer.project_name)
        check_run_dir(config.trainer.record_dir.absolute())
        tell(f"run directory: {config.trainer.record_dir}")
    with checks:
        check_push(config.trainer.push_to_hub)
    rows = {row.model.title: row for row in models.checked_models(config)}
    folders: dict[str, ModelFolder] = {}
    for role, row in rows.items():
        with checks:
            weights = not (dry_run and is_on_the_hub(row.settings.path))
            folder = folders[role] = models.check_files(row, weights=weights)
            if problems := list(problems_of_model(config, row, folder, machine)):
                raise config_error(problems)
            tell(f"{role}: {row.settings.path}: {models.check_use(row, folder)}")
    for role_row in roles_of(config):
        with checks:
            _check_optimizer(config, role_row)
    needs = check_code(config, checks, tell) if isinstance(config, RunConfig) else None
    with checks:
        load = load_attribute(command_of(config).load, key="a row of plan/commands.py")
        if (loaded := load(config, folders.get(POLICY), needs)) is not None:
            ready = Ready(*loaded)
            for line in (ready.data.counts, *ready.notes, f"training steps: {ready.steps}"):
                tell(line)
    if isinstance(config, RunConfig) and POLICY in folders:
        _check_together(config, rows, folders, ready, checks)
    if isinstance(config, SupervisedConfig) and ready is not None:
        with checks:
            metrics = [SUPERVISED_VALIDATION + name for name in ready.data.kind.metrics]
            require_metrics(config.trainer, metrics)
    with checks:
        checkpoint = "" if ready is None else check_resume(config, ready.data.identity, ready.steps, verify=dry_run)
        if checkpoint:
            tell(checkpoint)
    with checks:
        if ready is not None and (model := folders.get(POLICY)) is not None:
            memory = memory_estimate(config, model.config, model.num_parameters) or []
            if room := check_disk(config, memory, ready.steps):
                tell(room)
            sizes = machine.gpu_gib, machine.host_gib, model.num_parameters
            for problem in memory_problems(config, model.config, *sizes, certain=False):
                ready.notes.append(problem.text)
                tell(problem.text)
    checks.end()
    assert ready is not None
    return ready


def _check_optimizer(config: JobConfig, row: Role) -> None:
    key, model = optimizer_key(config, row), row.model(config)
    if key and model is not None and value_of(config, key).override_optimizer_config:
        # slow imports, which other runs do without
        from grpo_dist.engines.train.model_loading import DTYPES
        from grpo_dist.engines.train.optimizer import check_overrides

        check_overrides(value_of(config, key), DTYPES[model.held], f"{key}.override_optimizer_config")


def problems_of_model(config: JobConfig, row: CheckedModel, model: ModelFolder, machine: Machine) -> Iterator[Problem]:
    """Yield what a model's config.json and the machine's memory rule out."""
    if row.model.title != POLICY:
        yield from position_problems(config, row.model, model.config)
        return
    yield from model_problems(config, model.config, machine.gpu_gib, machine.host_gib, model.num_parameters)
    changed = overridden(model.config, row.settings.model.override_config)
    dtype = engine_dtype(config) if isinstance(config, RunConfig) else ""
    if why := engine_of(config).model_problem(changed, config.device, dtype):
        text = f"{row.model.setting}: {why}; use another model, or GPUs (trainer.n_gpus_per_node)"
        yield Problem(text, (row.settings.key, "trainer.n_gpus_per_node"))


def _check_together(
    config: RunConfig,
    rows: Mapping[str, CheckedModel],
    folders: Mapping[str, ModelFolder],
    ready: Ready[Any] | None,
    checks: Checks,
) -> None:
    policy = folders[POLICY]
    with checks:
        if ready is not None and config.data.sampler.code is not None:
            try_sampler(config, ready.data.sampler)
    with checks:
        models.check_teachers(config, ready.data.train if ready is not None else ())
    for role, row in rows.items():
        with checks:
            if row.model.reads_tokens and role in folders:
                models.check_tokens(config, row, folders[role], policy)
    with checks:
        if ready is not None and REWARD_MODEL in folders:
            prompts = [*ready.data.train, *ready.data.validation]
            models.check_conversations(config, policy, folders[REWARD_MODEL], prompts)


def check_code(config: RunConfig, checks: Checks, tell: Callable[[str], None]) -> RowNeeds:
    """Import what the config names, and try its own estimators, losses and KL terms, each of which may be wrong.

    Returns:
        What the reward function reads of a row; nothing if it cannot be imported, since nobody knows then.
    """
    with checks:
        resolve_names(config)
        tell("functions and classes named in the config: all found")
        for named, attempt in own_functions(config):
            with checks:
                attempt()
                tell(f"{named}: tried on made-up numbers")
    needs, custom = RowNeeds(ground_truth=False), config.custom_reward_function
    with checks:
        needs = import_reward(config)
        paths = [config.reward_function] if custom.listed is None else [entry.get("path") for entry in custom.listed]
        uncalled = " (found, not called; grpo-dist check-env calls it on a few rows)" if custom.path else ""
        named = ", ".join(path or "built-in, by data_source" for path in paths) + uncalled
        tell(f"reward: {named if needs.asked else 'given by the agent loop'}")
    return needs


# --- the machine -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Machine:
    """The machine or cluster that a run will use.

    Attributes:
        gpu_gib: memory of the smallest GPU, GiB; None: unknown, or there is no GPU.
        host_gib: CPU memory, GiB; None: unknown.
    """

    description: str
    gpu_gib: float | None
    host_gib: float | None = None


def check_machine(config: JobConfig, slots: Sequence[Slot]) -> Machine:
    """Find the Ray cluster, or on this machine the CPUs and GPUs that a local one would need.

    Raises:
        ConfigError: no cluster answers, there are too few CPUs or GPUs, or a package is built for another device.
    """
    address = find_cluster(config.ray_kwargs.ray_init.address)
    if address != LOCAL:
        return Machine(f"the Ray cluster at {address}", config.cluster.gpu_memory_gib if config.num_gpus else None)
    if problem := engine_of(config).needs(config.device):
        alone = "trainer.dry_run=config checks only the config"
        raise ConfigError(f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: {problem}; {alone}")
    gpus = gpu_memory_gib() if config.num_gpus else []
    if config.num_gpus > len(gpus):
        raise ConfigError(
            f"trainer.nnodes={config.trainer.nnodes}, trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: this "
            f"machine has {len(gpus)} GPUs, and the run would start Ray on it; set them to what it has (0: train on "
            "CPU), or ray_kwargs.ray_init.address to a cluster; trainer.dry_run=config checks only the config"
        )
    _check_cpus(config, slots)
    if isinstance(config, RunConfig) and not (agent := config.actor_rollout_ref.rollout.agent).is_single_turn:
        socket_at(agent.endpoint_host, LOOPBACK).close()
    if not gpus:
        return Machine(f"{logical_cpus()} CPUs, {memory_gib():.3g} GiB", None, memory_gib())
    description = f"{len(gpus)} GPUs, {min(gpus):.3g} GiB each; {memory_gib():.3g} GiB of CPU memory"
    return Machine(description, config.cluster.gpu_memory_gib or min(gpus), memory_gib())


def gpu_memory_gib() -> list[float]:
    """Memory of each GPU that this process may use, GiB; a ConfigError if torch cannot use what the driver lists."""
    import torch

    try:
        count = torch.cuda.device_count()
        return [torch.cuda.get_device_properties(number).total_memory / GIB for number in range(count)]
    except RuntimeError as error:
        raise ConfigError(
            f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use this machine's GPUs: "
            f"{str(error).splitlines()[0]} `grpo-dist doctor` compares driver and build (for drivers before 580: "
            "make setup DEVICE=gpu CUDA=12); trainer.n_gpus_per_node=0 trains on CPU"
        ) from None


def _check_cpus(config: JobConfig, slots: Sequence[Slot]) -> None:
    """Check that the logical CPUs that all processes request exist: Ray would wait for them for ever."""
    asked = config.ray_kwargs.ray_init.num_cpus
    available = asked or logical_cpus()
    slots = [slot for slot in slots if slot.required]
    needed = sum(slot.num_cpus for slot in slots)
    if needed > available + 1e-6:
        seats = [seat for slot in slots for seat in slot.seats]
        setting = f"cluster.num_cpus_per_worker={min(seat.num_cpus for seat in seats):g}"
        sizes = "cluster.*, reward.num_workers" if any(seat.role == "reward" for seat in seats) else "cluster.*"
        have = f"ray_kwargs.ray_init.num_cpus={asked}" if asked else f"this machine has {available}"
        raise ConfigError(
            f"{setting}: the processes of all roles request {needed:g} logical CPUs from Ray, but {have}; lower it, "
            f"or the numbers of processes ({sizes})"
        )


# --- the run's folder: its checkpoint to resume from, whether all is done, its disk -----------------------------------
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
        config_changes.read_config(folder)
    except CheckpointError:
        if verify:
            raise
        return ""  # damaged: the run will look for an earlier one
    code = config_changes.digest_code(config, state.code)
    changes = config_changes.check_changes(folder, state, config, identity, code)
    done = _is_trained(config, state.step, state.metrics, steps)
    if changes and trainer.resume_mode == "force" and done and not trainer.val_only:
        listed = "\n".join(f"  {line}" for line in changes)
        raise ConfigError(
            f"trainer.resume_mode=force: nothing is left to train with these changes, since {folder} is at step "
            f"{state.step} of {steps}:\n{listed}\nRaise trainer.total_training_steps or trainer.total_epochs, "
            "or set trainer.stop_at to another value"
        )
    text = nothing_to_train(config, steps) if is_finished(config, steps) else f"checkpoint to resume from: {folder}"
    return "\n".join([text, *config_changes.told(changes)])


def _check_model(config: JobConfig, run_dir: Path) -> None:
    """Check that a run that starts anew replaces no model of another experiment that has left no checkpoint."""
    trainer = config.trainer
    if trainer.resume_mode != "auto" or trainer.val_only or not (run_dir / EXPORTED).is_dir():
        return
    try:
        changes = config_changes.find_changes(run_dir, config)
    except CheckpointError:
        return  # no record of what the model is of
    if differing := [*changes.experiment, *changes.refused]:
        listed = "\n".join(f"  {line}" for line in differing)
        raise ConfigError(
            f"{run_dir / EXPORTED} is the model of another experiment, and this run would replace it. These have "
            f"changed:\n{listed}\nFor a run of its own, set {config_changes.another_place(config)}. To replace the "
            "model, set trainer.resume_mode=disable."
        )


def is_finished(config: JobConfig, steps: int) -> bool:
    """Tell if an earlier start of this run has trained all steps, and written the model if that is asked for."""
    trainer, run_dir = config.trainer, Path(config.trainer.default_local_dir)
    folder = last_checkpoint(run_dir)
    if trainer.val_only or trainer.resume_mode not in ("auto", "force") or folder is None:
        return False
    exported, lora = [EXPORTED] if trainer.export_hf_model else [], command_of(config).lora_section
    if exported and lora and value_of(config, lora).trains_factors:
        exported.append(ADAPTER_FOLDER)
    try:
        state = read_state(folder)
        return _is_trained(config, state.step, state.metrics, steps) and all(
            is_model_of(run_dir / name, folder) and read_usage(run_dir / name).dtype == config.export_dtype
            for name in exported
        )
    except (CheckpointError, DataError):  # damaged: it is written again
        return False


def _is_trained(config: JobConfig, step: int, metrics: Mapping[str, float], steps: int) -> bool:
    """Tell if no step is left after a checkpoint: there are no more, or its validation has reached `stop_at`."""
    return step >= steps or bool(why_it_ends(config.trainer.stop_at, metrics))


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
    lines.append(f"To train longer, raise {key}. For another run, change trainer.experiment_name or default_local_dir.")
    return "\n".join(lines)


def check_disk(config: JobConfig, roles: Sequence[RoleMemory], steps: int) -> str:
    """Check that the first checkpoint fits on the disk, as is done before each; returns the room in words, or "".

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
