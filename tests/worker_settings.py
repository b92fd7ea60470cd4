"""What workers are built from, for tests: sections of the default config with some values changed."""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any

from grpo_dist.config.schema_roles import (
    ActorRolloutRefConfig,
    AgentConfig,
    EngineKwargsConfig,
    LoraSection,
    ModelConfig,
    RolloutConfig,
)
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.plan.commands import load_config


@functools.cache
def default_roles() -> ActorRolloutRefConfig:
    """The section of the roles as it is without a word of the user."""
    return load_config([])[0].actor_rollout_ref


def engine_settings(path: str = "", **changes: Any) -> EngineSettings:
    """A small engine on the CPU; changes are of its fields or of keys of its sections."""
    plain = EngineSettings(default_roles().rollout, default_roles().model, "cpu", "float32", max_model_len=96, seed=0)
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 128, "kv_cache_memory_gib": 0.0625}
    ways = {"enforce_eager": True, "enable_chunked_prefill": False, "gpu_memory_utilization": 0.8}
    return changed(plain, **({"path": path} | limits | ways | changes))


def changed(settings: EngineSettings, **changes: Any) -> EngineSettings:
    """The settings with other values of fields, or of keys of their sections."""
    if "vllm" in changes:
        changes["engine_kwargs"] = EngineKwargsConfig(vllm=changes.pop("vllm"))
    own = {field.name: changes.pop(field.name) for field in fields(settings) if field.name in changes}
    model = {name: changes.pop(name) for name in ModelConfig.model_fields if name in changes}
    assert changes.keys() <= RolloutConfig.model_fields.keys(), changes
    sections = {"rollout": settings.rollout.replaced(**changes), "model": settings.model.replaced(**model)}
    return replace(settings, **(sections | own))


def agent(name: str, kwargs: dict[str, Any] | None = None, **limits: Any) -> AgentConfig:
    """The section of an agent loop."""
    return default_roles().rollout.agent.replaced(default_agent_loop=name, agent_kwargs=kwargs or {}, **limits)


def lora(rank: int = 4, alpha: float = 8.0, targets: tuple[str, ...] = ("all-linear",), **keys: Any) -> LoraSection:
    """LoRA's keys of a model that belongs to no hub."""
    values = {"path": "builtin:", "exclude_modules": None, "lora_adapter_path": None} | keys
    return LoraSection(lora_rank=rank, lora_alpha=alpha, target_modules=targets, **values)
