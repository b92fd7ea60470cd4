"""The model of a checkpoint as a Hugging Face folder, written by this process alone: on CPU, without Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from grpo_dist.assets import POLICY_KEY, TRAINED_MODEL_KEY, resolve_model_path
from grpo_dist.assets.adapter_folder import ADAPTER_FOLDER
from grpo_dist.config.command import AnyCommand
from grpo_dist.config.load import saved_values
from grpo_dist.config.problems import with_value
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import SupervisedConfig
from grpo_dist.engines.rendezvous import alone
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train.checkpoint import load_training_state
from grpo_dist.engines.train.fsdp_model import load_sharded_model
from grpo_dist.engines.train.hf_export import export_adapter, export_hf_model
from grpo_dist.errors import CheckpointError
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT
from grpo_dist.plan.placement import placement
from grpo_dist.plan.roles import roles_of
from grpo_dist.trainer.checkpoint.config_changes import read_config
from grpo_dist.trainer.checkpoint.folder import step_of
from grpo_dist.trainer.checkpoint.manifest import damage
from grpo_dist.trainer.loop import exported_usage
from grpo_dist.trainer.model_settings import model_settings


def saved_run(checkpoint: Path, model: str | None = None) -> RunConfig | SupervisedConfig:
    """The config of the run that wrote a checkpoint.

    Args:
        model: where the model is that the run started from; None: where the run found it.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: it has keys or values that this version does not know.
    """
    values = read_config(checkpoint)
    command: AnyCommand = SFT if "messages_key" in values.get("data", {}) else REWARD_MODEL
    key = TRAINED_MODEL_KEY
    if "actor_rollout_ref" in values:
        command, key = GRPO, POLICY_KEY
    config = saved_values(values, command)
    return config if model is None else with_value(config, key, model)


def export_checkpoint(checkpoint: Path, config: RunConfig | SupervisedConfig, folder: Path, dtype: str) -> None:
    """Write the policy, or the model of a supervised run, with LoRA's factors merged; the adapter comes beside it.

    Args:
        dtype: of the weights in the files: "fp32" or "bf16".

    Raises:
        CheckpointError: the checkpoint is damaged or of another model, or the files cannot be written.
        DataError: the model that the run started from is not there.
    """
    if problems := damage(checkpoint):
        raise CheckpointError(f"{checkpoint}: not an intact checkpoint: {'; '.join(problems)}. Choose another step")
    settings, role = _settings(config)
    with alone("cpu"):
        model = load_sharded_model(settings, "cpu")
        load_training_state(checkpoint / role, model, None, None)
        usage = exported_usage(config, step_of(checkpoint), dtype, checkpoint)
        if settings.lora is not None:  # first: once the model is there, all is written
            export_adapter(model, settings, folder.with_name(f"{folder.name}_{ADAPTER_FOLDER}"), dtype, usage)
        export_hf_model(model, settings, folder, dtype, usage)


def _settings(config: RunConfig | SupervisedConfig) -> tuple[ModelSettings, str]:
    """Return what the model is built from, on CPU and on one rank; and the role whose shards it is in."""
    row, *_ = roles_of(config)
    settings = model_settings(config, row, placement(config))
    path = resolve_model_path(settings.path, key=settings.key)
    return replace(settings, path=path, compute_dtype=settings.model_dtype, layers=None), row.name
