"""The rules and notes of the commands, and the rules on files that a config names: a problem for each that is missing.

All of them run, so one attempt shows everything. Machines are not asked here: whether a GPU is
really there is found out when Ray starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec

from grpo_dist.assets import BUILTIN, is_file, is_folder, resolve_model_path
from grpo_dist.config.data_files import parse_data_file
from grpo_dist.config.field_types import EIGHT_BIT, NEEDS_TORCHAO
from grpo_dist.config.keys import leaf_keys
from grpo_dist.config.problems import Problem, between_keys, missing_path, shown, value_of
from grpo_dist.config.run_code import UPDATE
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.config.schema_roles import ADAPTER_KEY
from grpo_dist.engines.base import RolloutBackend, builtin_backends, rollout_backend
from grpo_dist.errors import ConfigError
from grpo_dist.plan.key_rules import KEY_RULES, job_notes, job_rules, run_notes
from grpo_dist.plan.memory_rules import memory_notes
from grpo_dist.plan.model_rules import experts_stay_frozen, models_take_it
from grpo_dist.plan.placement_rules import (
    PLACEMENT_RULES,
    Rule,
    parts_that_wait,
    ranks_are_divided,
    roles_fit_on_the_gpus,
)
from grpo_dist.plan.roles import models_of
from grpo_dist.plugins.names import parse_code

_ROLLOUT = "actor_rollout_ref.rollout"
_CODE = (*UPDATE, f"{_ROLLOUT}.name", f"{_ROLLOUT}.agent.default_agent_loop", "data.sampler.class_path")
# Settings, by how they end -> the package that they need, and what to say without it.
_PACKAGES = {
    **{f"rollout.name={engine.name}": (engine.packages[0], engine.install) for engine in builtin_backends()},
    f".optimizer={EIGHT_BIT}": ("torchao", NEEDS_TORCHAO),
    ".model_dtype=bf16": ("torchao", f"for weights that train it {NEEDS_TORCHAO}"),
}


def files_exist(config: JobConfig) -> Iterator[Problem]:
    """The checkpoint to resume from is there, and data files and folders, of a kind that can be read."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path and not is_folder(trainer.resume_from_path):
        yield missing_path("trainer.resume_from_path", trainer.resume_from_path, "folder")
    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        for name in files:
            parsed = parse_data_file(key, name)
            if isinstance(parsed, Problem):
                yield parsed


def model_folders_exist(config: JobConfig) -> Iterator[Problem]:
    """A built-in model is known, a path that is no hub name is a folder with a config.json, and adapters are there."""
    for key, path in dict.fromkeys((model.key, model.path) for model in models_of(config)):
        section = key.removesuffix(".path")
        adapter = getattr(value_of(config, section), ADAPTER_KEY, None)
        if adapter is not None and not is_folder(adapter):
            yield missing_path(f"{section}.{ADAPTER_KEY}", adapter, "folder")
        if path.startswith(BUILTIN):
            try:
                resolve_model_path(path, key=key)
            except ConfigError as error:
                yield Problem(str(error), (key,))
        elif looks_like_folder(path):
            if not is_folder(path):
                yield missing_path(key, path, "folder")
            elif not is_file(f"{path}/config.json"):
                yield missing_path(key, path, "config.json in the folder")


def _own_code(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield key, value, and file or module of each function and class that the config names."""
    custom = config.custom_reward_function
    functions = [custom.path] if custom.listed is None else [entry.get("path") for entry in custom.listed]
    named = [("custom_reward_function.path", path) for path in functions]
    for key, name in [*named, *((key, value_of(config, key)) for key in _CODE)]:
        if source := parse_code(str(name or "")).source:
            yield key, str(name), source


def custom_code_exists(config: RunConfig) -> Iterator[Problem]:
    """Python files named by the config are there."""
    for key, _, source in _own_code(config):
        if (source.endswith(".py") or "/" in source) and not is_file(source):
            missing = missing_path(key, source, "file")
            if key == "custom_reward_function.path" and not source.endswith((".py", ".pkl")):  # as TRL names a model
                remedy = f"; a reward model is named by reward_model.enable=true reward_model.model.path={source}"
                missing = replace(missing, text=missing.text + remedy)
            yield missing


def code_is_not_tried(config: RunConfig) -> Iterator[Problem]:
    """Note that a dry run of the config does not look into code."""
    own = [(key, name) for key, name, _ in _own_code(config) if ":" in name or name.endswith(".py")]
    if own and config.trainer.dry_run == "config":
        named = ", ".join(f"{key}={name}" for key, name in own)
        yield Problem(f"{named}: not read and not tried; trainer.dry_run=true does that", tuple(key for key, _ in own))


def packages_are_installed(config: JobConfig) -> Iterator[Problem]:
    """On this machine, unless the workers run on a cluster that is already there."""
    address = config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS") or "local"
    for key in leaf_keys(type(config)) if address == "local" else ():
        setting = f"{key}={shown(value_of(config, key))}"
        for end, (package, what) in _PACKAGES.items():
            if setting.endswith(end) and find_spec(package) is None:
                yield Problem(f"{setting}: {what}", (key,), missing_file=True)


# --- the engine ----------------------------------------------------------------------------------------------------
def engine_of(config: JobConfig) -> RolloutBackend:
    """Return what is known of the engine that samples; of a command that has none, what is so of every engine."""
    return rollout_backend(config.actor_rollout_ref.rollout.name if isinstance(config, RunConfig) else "")


def engine_takes_it(config: RunConfig) -> Iterator[Problem]:
    """Report what the engine cannot do, and its arguments that are not to be set."""
    seeded = config.actor_rollout_ref.rollout.resolved_deterministic(config.device)
    yield from engine_of(config).problems(config, seeded=seeded)


def other_type(config: RunConfig) -> str | None:
    """Return the type in which passes of the trainer show what rounding does: float32, or that of the engines if it
    alone is shorter; None: neither is.
    """
    trainer, engines, default = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.default_dtype
    shorter = engines.resolved_dtype(default) if trainer.fsdp_config.resolved_dtype(default) == "fp32" else ""
    return None if shorter == "float32" else shorter or "float32"


def engine_notes(config: RunConfig) -> Iterator[Problem]:
    """Notes on arguments that change what is sampled."""
    engine = engine_of(config)
    for key, value in engine.inexact(config).items():
        why = (
            "responses are sampled from another distribution than the one that the trainer's log-probs are of; "
            "training/rollout_probs_diff_* shows the difference, algorithm.rollout_correction corrects for it"
        )
        yield Problem(f"{key}={shown(value)}: {why}", (key,))
    if drafted := engine.unseeded(config):
        why = "drafted tokens are of the same distribution, but not those that the same seeds give without"
        yield Problem(f"{drafted}: {why}", (drafted.partition("=")[0],))


# --- all rules -------------------------------------------------------------------------------------------------------
RULES: tuple[Rule, ...] = (
    job_rules,
    *KEY_RULES,
    *PLACEMENT_RULES,
    engine_takes_it,
    models_take_it,
    files_exist,
    model_folders_exist,
    custom_code_exists,
    packages_are_installed,
)
NOTES: tuple[Rule, ...] = (
    run_notes,
    parts_that_wait,
    engine_notes,
    experts_stay_frozen,
    code_is_not_tried,
    memory_notes,
    job_notes,
)


@between_keys
def passes_hold_the_longest_row(config: SupervisedConfig) -> Iterator[str]:
    """The token budget holds at least the longest conversation."""
    budget = config.data.max_token_len
    if budget is not None and budget < config.data.max_length:
        why = "a pass must hold the longest conversation; raise the first or lower the second"
        yield f"<data.max_token_len_per_gpu>, <data.max_length>: {why}"


# Of the commands that train one model on rows with known answers.
SUPERVISED_RULES: tuple[Callable[[SupervisedConfig], Iterator[Problem]], ...] = (
    job_rules,
    files_exist,
    model_folders_exist,
    roles_fit_on_the_gpus,
    ranks_are_divided,
    passes_hold_the_longest_row,
    models_take_it,
    packages_are_installed,
)
SUPERVISED_NOTES: tuple[Callable[[SupervisedConfig], Iterator[Problem]], ...] = (memory_notes, job_notes)


def looks_like_folder(path: str) -> bool:
    """Tell if a model path means a local folder rather than a hub name (NAME or OWNER/NAME)."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or is_folder(path)
