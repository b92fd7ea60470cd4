"""How the model of a run is meant to be asked, which is written beside it (assets/usage.py)."""

from __future__ import annotations

from grpo_dist.assets.usage import Usage
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.config.schema_supervised import SFTConfig
from grpo_dist.trainer.settings import sampling_settings

SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "stop")


def model_usage(config: JobConfig, step: int | None) -> Usage:
    """The prompts of a run, and how it samples in validation, with which its reported numbers were reached.

    A fine-tuned model has the template's variables alone, and a reward model nothing but its step.
    """
    if isinstance(config, RunConfig):
        _, sampling = sampling_settings(config)
        values = {name: getattr(sampling, name) for name in SAMPLING}
        return Usage(step, config.data.system_prompt, config.data.apply_chat_template_kwargs, values)
    if isinstance(config, SFTConfig):
        return Usage(step, apply_chat_template_kwargs=config.data.apply_chat_template_kwargs)
    return Usage(step)
