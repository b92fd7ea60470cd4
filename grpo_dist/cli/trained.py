"""What `RUN_OR_MODEL` names in the commands that use a model: its folder, and how its run asked it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from grpo_dist.assets import POLICY_KEY, resolve_model_path
from grpo_dist.assets.paths import expanded
from grpo_dist.assets.usage import FILE, Usage, read_usage
from grpo_dist.config.environment import from_environment
from grpo_dist.config.grpo import GRPO
from grpo_dist.config.load import with_overrides
from grpo_dist.config.model_rules import max_positions
from grpo_dist.config.placement import placement
from grpo_dist.config.problems import with_value
from grpo_dist.config.schema import RunConfig
from grpo_dist.engines.installed_build import build_problem
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.cpu_attention import attention_problem
from grpo_dist.errors import ConfigError
from grpo_dist.terminal import show
from grpo_dist.trainer.checkpoint.config_changes import read_config
from grpo_dist.trainer.checkpoint.export import export_checkpoint, saved_run, step_of, steps_of
from grpo_dist.trainer.model_usage import model_usage
from grpo_dist.trainer.record import EXPORTED, RESOLVED_CONFIG
from grpo_dist.trainer.settings import engine_settings

AGENT_KEY, SINGLE_TURN = "actor_rollout_ref.rollout.agent.default_agent_loop", "single_turn_agent"
MOST_TOKENS = 8192  # of a sequence, where nobody asks for more: memory of the KV cache


@dataclass(frozen=True)
class TrainedModel:
    """A model to use.

    Attributes:
        name: for tables: the run's folder and the step, or what was named.
        folder: in Hugging Face's format.
        config: of the run, with the overrides; `actor_rollout_ref.model.path` is the folder. For a model of no run the
            defaults.
        usage: how to ask it.
        base: path or name of the model that its run began with; None: it is of no run that trains a policy.
    """

    name: str
    folder: Path
    config: RunConfig
    usage: Usage
    base: str | None = None


def add_model_argument(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Add RUN_OR_MODEL and the overrides behind it."""
    what = "folder of a run, a checkpoint in it, a Hugging Face folder, a hub name or builtin:NAME"
    parser.add_argument("model", metavar="RUN_OR_MODEL", help=what, **options)
    more = "keys of the run's config to change (grpo-dist help KEY)"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=more)


def find_trained(named: str, overrides: Sequence[str] = (), step: int | None = None) -> TrainedModel:
    """Find a model; a checkpoint that has not been exported yet is exported into the run's folder.

    Args:
        named: what the user has named.
        overrides: of the config.
        step: of the checkpoint; None: the last one.

    Raises:
        ConfigError: there is no such run, checkpoint or model, or an override is wrong.
        GrpoDistError: the checkpoint cannot be exported.
    """
    run_dir, step = run_and_step(named, step)
    exported = read_usage(run_dir / EXPORTED).step
    there = steps_of(run_dir)
    if not there and (exported is None or step not in (None, exported)):
        if step is not None or (run_dir / RESOLVED_CONFIG).is_file():
            raise ConfigError(no_checkpoint(run_dir, step))
        return _model(named, overrides)
    if not there:  # a run that was to write none
        folder, chosen, values = run_dir / EXPORTED, exported, read_config(run_dir)
    else:
        chosen = chosen_step(run_dir, there, step)
        folder = run_dir / EXPORTED if chosen == exported else exported_step(run_dir, there[chosen])
        values = read_config(there[chosen])
    name = f"{run_dir.name or run_dir} step {chosen}"
    if "actor_rollout_ref" not in values:  # of another command, whose keys are not those of a policy in training
        config = _with_model({}, folder, overrides)
        return TrainedModel(name, folder, config, read_usage(folder))
    config = _with_model(values, folder, overrides)
    base = from_environment(values["actor_rollout_ref"]["model"]["path"], (POLICY_KEY,))
    return TrainedModel(name, folder, config, model_usage(config, chosen), base)


def base_of(model: TrainedModel) -> TrainedModel:
    """The model that a run began with, to be asked as the run asked it.

    Raises:
        ConfigError: the model is of no run, or the one that it began with is no longer there.
    """
    if model.base is None:
        raise ConfigError(
            f"--base: {model.name} is not the model of a run that trains a policy; name its base model too"
        )
    base = replace(_model(model.base, ()), name=f"base {model.base}", usage=replace(model.usage, step=None))
    return replace(base, config=with_value(model.config, POLICY_KEY, str(base.folder.absolute())))


def run_and_step(named: str, step: int | None) -> tuple[Path, int | None]:
    """The run's folder and the step, where a checkpoint in it may be named instead."""
    folder = expanded(named)
    if folder.name.startswith("global_step_") and (folder / "state.json").is_file():
        return folder.parent, step_of(folder)
    return folder, step


def chosen_step(run_dir: Path, there: Mapping[int, Path], step: int | None) -> int:
    """The step of a checkpoint; None: the last one.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    if not there:
        raise ConfigError(no_checkpoint(run_dir, step))
    if step is not None and step not in there:
        steps = ", ".join(map(str, there))
        raise ConfigError(f"--step {step}: {run_dir} has checkpoints of the steps {steps}; choose one of them")
    return max(there) if step is None else step


def no_checkpoint(run_dir: Path, step: int | None) -> str:
    """That a folder has no checkpoints, and which folder has."""
    asked = "" if step is None else f"--step {step}: "
    return (
        f"{asked}{run_dir}: there is no checkpoint (global_step_N) in this folder; name the run's folder, "
        "trainer.default_local_dir of the run, which writes checkpoints every trainer.save_freq steps"
    )


def exported_step(run_dir: Path, checkpoint: Path) -> Path:
    """The exported model of a checkpoint, `huggingface_step_N` beside it; written if it is not there."""
    folder = run_dir / f"{EXPORTED}_step_{step_of(checkpoint)}"
    if not (folder / FILE).is_file():
        show(f"exporting {checkpoint} to {folder}\n", sys.stderr)
        config = saved_run(checkpoint)
        export_checkpoint(checkpoint, config, folder.absolute(), config.export_dtype)
    return folder


def _model(named: str, overrides: Sequence[str]) -> TrainedModel:
    """A model that belongs to no run."""
    folder = Path(resolve_model_path(named))
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{named}: neither a run's folder nor a model; name a run (trainer.default_local_dir), a checkpoint in "
            "it, a Hugging Face folder, a hub name such as Qwen/Qwen3-0.6B, or builtin:tiny-qwen3"
        )
    return TrainedModel(named, folder, _with_model({}, folder, overrides), read_usage(folder))


def _with_model(values: Mapping[str, Any], folder: Path, overrides: Sequence[str]) -> RunConfig:
    config = with_overrides(values, overrides, GRPO)
    return with_value(config, POLICY_KEY, str(folder.absolute()))


def engine_for(model: TrainedModel, max_model_len: int | None = None) -> EngineSettings:
    """What an engine is started with that serves this model alone, on the GPUs of one engine or on the CPU.

    Args:
        model: to serve.
        max_model_len: longest prompt and response; None: what the run has set, else what the model's config.json
            allows, but no more than `MOST_TOKENS`, or the run's prompts and responses.

    Raises:
        ConfigError: the model takes no sequences of that length, or this machine lacks the engine's device.
    """
    config = with_value(model.config, AGENT_KEY, SINGLE_TURN)  # its code is not needed
    model_config = json.loads((model.folder / "config.json").read_text())
    known = max_positions(model_config)
    usual = config.actor_rollout_ref.rollout.max_model_len or max(config.max_model_len, MOST_TOKENS)
    longest = max_model_len or (usual if known is None else min(usual, known[1]))
    if known is not None and longest > known[1]:
        raise ConfigError(
            f"--max-model-len {longest}: {known[0]} of the model's config.json is {known[1]}; ask for less"
        )
    settings = engine_settings(config, placement(config), 0)
    _check_device(settings)
    if settings.device == "cpu" and (problem := attention_problem(model_config)):
        raise ConfigError(f"{model.folder}: {problem}; use another model, or GPUs (trainer.n_gpus_per_node)")
    return replace(
        settings,
        max_model_len=longest,
        needs_tokenizer=True,
        lora=None,  # factors are merged
        free_cache_engine=False,
        weight_transport="object_store",
    )


def _check_device(settings: EngineSettings) -> None:
    """Check that this machine has the engine's GPUs, or the build for CPU."""
    if problem := build_problem(settings.device):
        raise ConfigError(problem)
    if settings.device == "cuda" and (there := torch.cuda.device_count()) < settings.tensor_parallel_size:
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={settings.tensor_parallel_size}: this machine has "
            f"{there} GPUs; set it to what there is, or trainer.n_gpus_per_node=0 for the CPU"
        )
