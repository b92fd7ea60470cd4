"""What `RUN_OR_MODEL` names in the commands that use a model: its folder, and how its run asked it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from grpo_dist.assets import POLICY_KEY, expanded, resolve_model_path
from grpo_dist.assets.model_folder import FILE, Usage, read_usage
from grpo_dist.config.environment import from_environment
from grpo_dist.config.load import with_overrides
from grpo_dist.config.problems import value_of, with_value
from grpo_dist.config.run_code import (
    ENGINE,
    MODEL,
    REWARD,
    SUPERVISED_MODEL,
    TRUST_KEY,
    code_of_run,
    hidden,
    refusal,
    require_trust,
)
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import SupervisedConfig
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.installed import attention_problem, build_problem
from grpo_dist.errors import ConfigError, did_you_mean
from grpo_dist.plan.commands import GRPO
from grpo_dist.plan.model_rules import max_positions
from grpo_dist.plan.placement import placement
from grpo_dist.terminal import show
from grpo_dist.trainer.checkpoint.config_changes import read_config
from grpo_dist.trainer.checkpoint.export import export_checkpoint, saved_run
from grpo_dist.trainer.checkpoint.folder import (
    LATEST,
    STATE,
    checkpoints,
    is_model_of,
    is_model_of_run,
    last_checkpoint,
    others,
    own_checkpoints,
    step_of,
)
from grpo_dist.trainer.loop import model_usage
from grpo_dist.trainer.record import EXPORTED, RESOLVED_CONFIG
from grpo_dist.trainer.settings import engine_settings

AGENT_KEY, SINGLE_TURN = "actor_rollout_ref.rollout.agent.default_agent_loop", "single_turn_agent"
ASKED = "data.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout.engine_kwargs."  # what asking a model needs
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
        unscored: why the run's reward function is not to be loaded; "": it may be.
    """

    name: str
    folder: Path
    config: RunConfig
    usage: Usage
    base: str | None = None
    unscored: str = ""


def find_trained(
    named: str, overrides: Sequence[str] = (), step: int | None = None, *, trust: bool = False
) -> TrainedModel:
    """Find a model; a checkpoint that has not been exported yet is exported into the run's folder.

    Args:
        step: of the checkpoint; None: the last one.
        trust: whether the run's folder may name code to run.
    """
    run_dir = expanded(named)
    checkpoint = named_checkpoint(run_dir, step)
    if checkpoint is None:
        usage = read_usage(run_dir / EXPORTED)
        if not is_model_of_run(run_dir / EXPORTED, run_dir) or step not in (None, usage.step):
            if step is not None or (run_dir / RESOLVED_CONFIG).is_file() or checkpoints(run_dir):
                raise ConfigError(no_checkpoint(run_dir, step))
            return _model(named, overrides)
        source, step = run_dir, usage.step  # of a run that was to write no checkpoint
    else:
        run_dir, source, step = checkpoint.parent, checkpoint, step_of(checkpoint)
    name, values = f"{run_dir.name or run_dir} step {step}", read_config(source)
    given, folder = with_overrides({}, overrides, GRPO), run_dir / EXPORTED
    if "actor_rollout_ref" not in values:  # of another command, whose keys are not those of a policy in training
        if checkpoint is not None:
            folder = exported(checkpoint, trusted_run(checkpoint, trust=trust))
        return TrainedModel(name, folder, _config_of(str(folder), folder, overrides), read_usage(folder))
    config = with_overrides(values, overrides, GRPO)
    lacking, unscored = (hidden(source / RESOLVED_CONFIG, config, keys, given) for keys in (ASKED, REWARD))
    if lacking:
        raise ConfigError(lacking)
    if not trust:
        require_trust(source / RESOLVED_CONFIG, code_of_run(config, ENGINE, given))
        if code := code_of_run(config, REWARD, given):
            unscored = refusal(source / RESOLVED_CONFIG, code)
    if checkpoint is not None:
        folder = exported(checkpoint, with_value(saved_run(checkpoint), TRUST_KEY, value_of(config, TRUST_KEY)))
    base = from_environment(values["actor_rollout_ref"]["model"]["path"], (POLICY_KEY,))
    config = _with_model(config, folder)
    return TrainedModel(name, folder, config, model_usage(config, step), base, unscored)


def base_of(model: TrainedModel) -> TrainedModel:
    """The model that a run began with, to be asked as the run asked it."""
    if model.base is None:
        raise ConfigError(
            f"--base: {model.name} is not the model of a run that trains a policy; name its base model too"
        )
    base = replace(_model(model.base, ()), name=f"base {model.base}", usage=replace(model.usage, step=None))
    return replace(base, config=_with_model(model.config, base.folder), unscored=model.unscored)


def named_checkpoint(folder: Path, step: int | None) -> Path | None:
    """Return the checkpoint that a folder is, else of the last run in it the last one, or the one of a step, if any."""
    if folder.name.startswith("global_step_") and (folder / STATE).is_file():
        if step not in (None, step_of(folder)):
            raise ConfigError(f"--step {step}: {folder} is a checkpoint of another step; name the run's folder")
        return folder
    own = own_checkpoints(folder)
    if step is None:
        return last_checkpoint(folder)
    if own and step not in own:
        steps = ", ".join(map(str, own))
        raise ConfigError(
            f"--step {step}: the run in {folder} has checkpoints at steps {steps}; choose one of them{others(folder)}"
        )
    return own.get(step)


def no_checkpoint(run_dir: Path, step: int | None) -> str:
    """Return that a folder has no checkpoint of its last run, and what else there is."""
    asked = "" if step is None else f"--step {step}: "
    if left := checkpoints(run_dir):
        return (
            f"{asked}{run_dir / LATEST} names none of the checkpoints that are there. The run that was started in this "
            "folder last has written none yet, or that file was not copied along; name the one that you mean, such as "
            f"{left[-1]}"
        )
    text = (
        f"{asked}{run_dir}: there is no checkpoint (global_step_N) in this folder; name the run's folder, "
        "trainer.default_local_dir of the run, which writes checkpoints every trainer.save_freq steps"
    )
    if (model := run_dir / EXPORTED).is_dir():
        text += (
            f". {model / FILE} does not say that the model is of the run of {run_dir / RESOLVED_CONFIG}: a run before "
            f"that wrote it, or an older version of grpo_dist; to use it all the same, name {model}"
        )
    return text


def exported(checkpoint: Path, config: RunConfig | SupervisedConfig) -> Path:
    """Return the folder of a checkpoint's model: that of the run's end, or `huggingface_step_N` beside it, which is
    written if it is not there.

    Raises:
        ConfigError: a model of another checkpoint is in its place.
        GrpoDistError: it cannot be exported.
    """
    if is_model_of(checkpoint.parent / EXPORTED, checkpoint):
        return checkpoint.parent / EXPORTED
    folder = checkpoint.parent / f"{EXPORTED}_step_{step_of(checkpoint)}"
    if folder.exists():
        if not is_model_of(folder, checkpoint):
            raise ConfigError(
                f"{folder / FILE} does not say that the model is that of {checkpoint}: it is of a checkpoint that was "
                "there before, or an older version of grpo_dist wrote it. Move the folder away, or remove it, and ask "
                "again: the checkpoint is then exported in its place"
            )
        return folder
    show(f"exporting {checkpoint} to {folder}\n", sys.stderr)
    export_checkpoint(checkpoint, config, folder.absolute(), config.export_dtype)
    return folder


def trusted_run(checkpoint: Path, model: str | None = None, *, trust: bool) -> RunConfig | SupervisedConfig:
    """Return the config of the run that wrote a checkpoint, to export it; see `saved_run`."""
    config = saved_run(checkpoint, model)
    if not trust:
        keys = MODEL if isinstance(config, RunConfig) else SUPERVISED_MODEL
        require_trust(checkpoint / RESOLVED_CONFIG, code_of_run(config, keys))
    return config


def _model(named: str, overrides: Sequence[str]) -> TrainedModel:
    """A model that belongs to no run."""
    path = expanded(named)
    beside = Path(*path.parts[:1])
    gone = "/" in named and not path.exists() and beside.is_dir()  # so it is no hub name
    folder = path if gone else Path(resolve_model_path(named))
    if not (folder / "config.json").is_file():
        depths = () if beside.is_absolute() else ("*", "*/*")
        runs = [str(file.parent) for depth in depths for file in beside.glob(f"{depth}/{RESOLVED_CONFIG}")]
        raise ConfigError(
            f"{named}: neither a run's folder nor a model{did_you_mean(named, runs, '{}')}; name a run "
            "(trainer.default_local_dir), a checkpoint in it, a Hugging Face folder, a hub name such as "
            "Qwen/Qwen3-0.6B, or builtin:tiny-qwen3"
        )
    return TrainedModel(named, folder, _config_of(named, folder, overrides), read_usage(folder))


def _config_of(named: str, folder: Path, overrides: Sequence[str]) -> RunConfig:
    """The defaults for a model that is named so: those of the built-in one do for no other."""
    as_told = ("data.apply_chat_template", read_usage(folder).apply_chat_template)
    return _with_model(with_overrides({}, [(POLICY_KEY, named), as_told, *overrides], GRPO), folder)


def _with_model(config: RunConfig, folder: Path) -> RunConfig:
    return with_value(config, POLICY_KEY, str(folder.absolute()))


def engine_for(model: TrainedModel, max_model_len: int | None = None) -> EngineSettings:
    """Return the settings of an engine that serves this model alone, on the GPUs of one engine or on the CPU.

    Args:
        max_model_len: longest prompt and response; None: what the run has set, else what the model's config.json
            allows, but no more than `MOST_TOKENS`, or the run's prompts and responses.
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
        model=settings.model.without_factors(),  # they are merged
        needs_tokenizer=True,
        shares_gpu=False,
        weight_transport="object_store",
    )


def _check_device(settings: EngineSettings) -> None:
    if problem := build_problem(settings.device):
        raise ConfigError(problem)
    size = settings.rollout.tensor_model_parallel_size
    if settings.device == "cuda" and (present := torch.cuda.device_count()) < size:
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}: this machine has {present} GPUs; set it to "
            "what there is, or trainer.n_gpus_per_node=0 for the CPU"
        )
