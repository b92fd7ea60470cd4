"""What is written into the folder of an exported model (assets/model_folder.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from grpo_dist.assets.model_folder import Usage
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SFTConfig
from grpo_dist.trainer.checkpoint.folder import run_digest
from grpo_dist.trainer.checkpoint.manifest import checkpoint_digest
from grpo_dist.trainer.settings import sampling_settings

SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "stop")


def model_usage(config: JobConfig, step: int | None) -> Usage:
    """Return the prompts of a run, and how it samples in validation, with which its reported numbers were reached.

    A fine-tuned model has the template's variables alone, and a reward model nothing but its step.
    """
    if isinstance(config, RunConfig):
        _, sampling = sampling_settings(config)
        values = {name: getattr(sampling, name) for name in SAMPLING}
        data, plain = config.data, config.data.apply_chat_template
        return Usage(step, data.system_prompt, data.apply_chat_template_kwargs, values, apply_chat_template=plain)
    if isinstance(config, SFTConfig):
        return Usage(step, apply_chat_template_kwargs=config.data.apply_chat_template_kwargs)
    return Usage(step)


def exported_usage(
    config: JobConfig, step: int, dtype: str, checkpoint: Path | None, run_dir: Path | None = None
) -> Usage:
    """Return what an exported model says of itself.

    Args:
        dtype: of the weights: "fp32" or "bf16".
        checkpoint: of that step; None: the run has written none.
        run_dir: of the run that exports it at its end; None: a command does.
    """
    digest = None if checkpoint is None else checkpoint_digest(checkpoint)
    return replace(
        model_usage(config, step), checkpoint=digest, run=None if run_dir is None else run_digest(run_dir), dtype=dtype
    )
