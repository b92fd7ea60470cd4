"""Builds models as their ranks will: in a dry run all, before a run those that LoRA's factors must fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from grpo_dist.assets import resolve_model_path
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train.fsdp_model import build_model


def build_models(models: Iterable[ModelSettings], device: str, tell: Callable[[str], None]) -> None:
    """Build each model without memory, with LoRA's factors, and match it with the names in its files.

    A run leaves those without factors to its ranks, since it takes the model's code.

    Args:
        models: what the ranks are built from.
        device: "cpu" or "cuda".
        tell: called with a line for each model that was built.

    Raises:
        ConfigError: LoRA or gradient checkpointing do not fit a model.
        DataError: a model cannot be built, or its files do not belong to it.
    """
    for settings in models:
        folder = resolve_model_path(settings.path, key=settings.key)
        built = build_model(replace(settings, path=folder), device, shards=1).model
        factors = f", {built.num_parameters(only_trainable=True):,} of them LoRA's" if settings.lora else ""
        tell(f"{settings.key}: built without memory: {built.num_parameters():,} parameters{factors}")
