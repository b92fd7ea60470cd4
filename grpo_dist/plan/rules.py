"""The rules of `grpo-dist train`, and those on the files that a config names: one problem for each that is missing.

All of them run, so one attempt shows everything. Machines are not asked here: whether a GPU is
really there is found out when Ray starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from grpo_dist.assets import BUILTIN, expanded, is_file, is_folder, resolve_model_path
from grpo_dist.config.adapter import ADAPTER_KEY, engines_take_the_factors
from grpo_dist.config.data_files import DataFileProblem, parse_data_file
from grpo_dist.config.engine_arguments import ENGINE_RULES, engine_notes
from grpo_dist.config.problems import Problem, value_of
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.errors import ConfigError
from grpo_dist.plan.key_rules import KEY_RULES, job_notes, job_rules, run_notes
from grpo_dist.plan.memory_rules import memory_notes
from grpo_dist.plan.model_rules import experts_stay_frozen, models_take_it
from grpo_dist.plan.placement_rules import PLACEMENT_RULES, Rule
from grpo_dist.plan.roles import models_of
from grpo_dist.plugins.names import parse_code


def files_exist(config: JobConfig) -> Iterator[Problem]:
    """The checkpoint to resume from is there, and data files and folders, of a kind that can be read."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path and not is_folder(trainer.resume_from_path):
        yield _missing("trainer.resume_from_path", trainer.resume_from_path, "folder")
    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        for name in files:
            parsed = parse_data_file(name)
            if isinstance(parsed, DataFileProblem):
                yield Problem(f"{key}={name}: {parsed.text}", (key,), missing_file=parsed.missing)


def model_folders_exist(config: JobConfig) -> Iterator[Problem]:
    """A built-in model is known, a path that is no hub name is a folder with a config.json, and adapters are there."""
    for key, path in {model.key: model.path for model in models_of(config)}.items():
        section = key.removesuffix(".path")
        adapter = getattr(value_of(config, section), ADAPTER_KEY, None)
        if adapter is not None and not is_folder(adapter):
            yield _missing(f"{section}.{ADAPTER_KEY}", adapter, "folder")
        if path.startswith(BUILTIN):
            try:
                resolve_model_path(path, key=key)
            except ConfigError as error:
                yield Problem(str(error), (key,))
        elif looks_like_folder(path):
            if not is_folder(path):
                yield _missing(key, path, "folder")
            elif not is_file(f"{path}/config.json"):
                yield _missing(key, path, "config.json in the folder")


def custom_code_exists(config: RunConfig) -> Iterator[Problem]:
    """Python files named by the config are there."""
    agent, custom = config.actor_rollout_ref.rollout.agent, config.custom_reward_function
    named = {
        "data.sampler.class_path": config.data.sampler.class_path,
        "algorithm.adv_estimator": config.algorithm.adv_estimator,
        "actor_rollout_ref.rollout.name": config.actor_rollout_ref.rollout.name,
        "actor_rollout_ref.rollout.agent.default_agent_loop": agent.default_agent_loop,
        "actor_rollout_ref.actor.kl_loss_type": config.actor_rollout_ref.actor.kl_loss_type,
        "actor_rollout_ref.actor.policy_loss.loss_mode": config.actor_rollout_ref.actor.policy_loss.loss_mode,
    }
    functions = [custom.path] if custom.listed is None else [each.get("path") for each in custom.listed]
    for key, name in [*(("custom_reward_function.path", path) for path in functions), *named.items()]:
        source = parse_code(str(name or "")).source
        if source and (source.endswith(".py") or "/" in source) and not is_file(source):
            yield _missing(key, source, "file")


def vllm_is_installed(config: RunConfig) -> Iterator[Problem]:
    """On this machine, unless the workers run on a cluster that is already there, or with another engine."""
    if config.actor_rollout_ref.rollout.name != "vllm":
        return
    address = config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local" and find_spec("vllm") is None:
        key = "actor_rollout_ref.rollout.name"
        text = f"{key}=vllm: vLLM is not installed here; pip install -e '.[cpu]', or '.[gpu]' on a GPU machine"
        yield Problem(text, (key,), missing_file=True)


RULES: tuple[Rule, ...] = (
    job_rules,
    *KEY_RULES,
    engines_take_the_factors,
    *PLACEMENT_RULES,
    *ENGINE_RULES,
    models_take_it,
    files_exist,
    model_folders_exist,
    custom_code_exists,
    vllm_is_installed,
)
NOTES: tuple[Rule, ...] = (run_notes, engine_notes, experts_stay_frozen, memory_notes, job_notes)


def looks_like_folder(path: str) -> bool:
    """Tell if a model path means a local folder rather than a hub name (NAME or OWNER/NAME)."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or is_folder(path)


def _missing(key: str, path: str, kind: str) -> Problem:
    where = "" if expanded(path).is_absolute() else f" (looked in {Path.cwd()})"
    return Problem(f"{key}={path}: no such {kind}{where}", (key,), missing_file=True)
