"""Checks before anything starts that the models of roles whose ranks split sequences allow it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from grpo_dist.assets import resolve_model_path
from grpo_dist.config.placement import placement
from grpo_dist.config.schema import RunConfig
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.trainer.model_settings import actor_model, critic_model, reference_model


def split_models(config: RunConfig) -> Iterator[ModelSettings]:
    """The models whose ranks split sequences."""
    place = placement(config)
    found = [actor_model(config, place)]
    found += [reference_model(config, place)] if place.ref_world_size else []
    found += [critic_model(config, place)] if place.critic_world_size else []
    return (model for model in found if model.sequence_parallel_size > 1)


def check_split_model(model: ModelSettings) -> None:
    """Check a model by its config.json.

    Raises:
        ConfigError: there is no such model, its heads do not split, or it takes padded sequences only.
    """
    # slow imports, which other runs do without
    from grpo_dist.engines.train.attention import check_split
    from grpo_dist.engines.train.model_loading import read_config

    folder = resolve_model_path(model.path, weights=False, key=model.key)
    check_split(read_config(replace(model, path=folder)), model)
