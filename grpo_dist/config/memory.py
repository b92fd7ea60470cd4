"""Memory of each process, estimated from the model's config.json.

Counts what is there for the whole run: weights, gradients, optimizer states, gathered layers, KV cache. Not
activations, the CUDA context, or Python itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_dist.assets import BUILTIN, resolve_model_path
from grpo_dist.config.placement import placement
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import ConfigError

GIB = 2**30
ADAM_STATES = 2  # AdamW's two running means, in the type of the weights
CPU_KV_CACHE_GIB = 1.0  # the engine's own choice where kv_cache_memory_gib is null; a test keeps the two equal
_BYTES = {"fp32": 4, "bf16": 2, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """Parameters of a model, and the sizes that memory depends on.

    Args:
        num_parameters: all of them; tied embeddings once.
        largest_unit: parameters that FSDP gathers at a time: a layer, or embedding and head.
        kv_values_per_token: keys and values of one token in all layers.
    """

    num_parameters: int
    largest_unit: int
    kv_values_per_token: int


@dataclass(frozen=True)
class RoleMemory:
    """What one process of a role holds: (name, GiB) parts, and a remark where a part is not a number."""

    role: str
    parts: tuple[tuple[str, float], ...]
    remark: str = ""

    @property
    def total(self) -> float:
        """GiB of all parts."""
        return sum(gib for _, gib in self.parts)


def model_config_at_hand(path: str) -> dict[str, Any] | None:
    """The model's config.json, if the model is built in or a local folder; hub names are not looked up."""
    try:
        folder = Path(resolve_model_path(path) if path.startswith(BUILTIN) else path).expanduser()
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, ConfigError):
        return None


def model_shape(model_config: dict[str, Any]) -> ModelShape | None:
    """Sizes of a Llama-like decoder (grouped-query attention, gated MLP, also experts); None for others."""
    text = model_config.get("text_config", model_config)
    try:
        hidden, layers, heads = text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"]
        width, vocabulary = text["intermediate_size"], text["vocab_size"]
    except KeyError:
        return None
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or hidden // heads
    experts = text.get("num_experts") or text.get("num_local_experts") or 1
    expert_width = text.get("moe_intermediate_size") or width
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    mlp = 3 * hidden * expert_width * experts + (hidden * experts if experts > 1 else 0)
    layer = attention + mlp + 2 * hidden
    embedding = vocabulary * hidden * (1 if text.get("tie_word_embeddings") else 2)
    return ModelShape(
        num_parameters=layers * layer + embedding + hidden,
        largest_unit=max(layer, embedding),
        kv_values_per_token=2 * layers * kv_heads * head_dim,
    )


def memory_estimate(config: RunConfig, model_config: dict[str, Any] | None) -> list[RoleMemory] | None:
    """Memory of one process of each role, in GiB; None if the model's sizes are not at hand."""
    shape = None if model_config is None else model_shape(model_config)
    if shape is None:
        return None
    place = placement(config)
    roles = [_actor(config, shape, place.actor_world_size), _rollout(config, shape, place.tensor_parallel)]
    if place.ref_world_size:
        compute = _BYTES[config.actor_rollout_ref.ref.fsdp_config.resolved_dtype(place.device)]
        parts = [("weights", shape.num_parameters * compute / place.ref_world_size)]
        if place.ref_world_size > 1:
            parts.append(("gathered layer", shape.largest_unit * compute))
        roles.append(_role("ref", parts))
    return roles


def kv_cache_tokens(config: RunConfig, model_config: dict[str, Any] | None) -> int | None:
    """Tokens whose keys and values fit in one engine's cache; None where the cache size is found at start."""
    shape = None if model_config is None else model_shape(model_config)
    gib = _kv_cache_gib(config)
    if shape is None or gib is None:
        return None
    per_gpu = shape.kv_values_per_token * _rollout_bytes(config) / placement(config).tensor_parallel
    return int(gib * GIB / per_gpu)


def _actor(config: RunConfig, shape: ModelShape, ranks: int) -> RoleMemory:
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    master, compute = _BYTES[fsdp.model_dtype], _BYTES[fsdp.resolved_dtype(config.device)]
    ranks = ranks if fsdp.fsdp_size < 0 else fsdp.fsdp_size
    shard = shape.num_parameters * master / ranks
    parts = [("weights", shard), ("gradients", shard), ("optimizer", ADAM_STATES * shard)]
    if ranks > 1 and fsdp.reshard_after_forward:
        parts.append(("gathered layer", shape.largest_unit * compute))
    elif ranks > 1 or master != compute:
        parts.append(("gathered model", shape.num_parameters * compute))
    return _role("actor", parts, "activations come on top")


def _rollout(config: RunConfig, shape: ModelShape, tensor_parallel: int) -> RoleMemory:
    parts = [("weights", shape.num_parameters * _rollout_bytes(config) / tensor_parallel)]
    gib = _kv_cache_gib(config)
    if gib is None:
        share = config.actor_rollout_ref.rollout.gpu_memory_utilization
        return _role("rollout", parts, f"KV cache: what is left of {share:.0%} of the GPU")
    return _role("rollout", [*parts, ("KV cache", gib * GIB)])


def _kv_cache_gib(config: RunConfig) -> float | None:
    asked = config.actor_rollout_ref.rollout.kv_cache_memory_gib
    return CPU_KV_CACHE_GIB if asked is None and config.device == "cpu" else asked


def _rollout_bytes(config: RunConfig) -> int:
    return _BYTES[config.actor_rollout_ref.rollout.resolved_dtype(config.device)]


def _role(role: str, parts: list[tuple[str, float]], remark: str = "") -> RoleMemory:
    return RoleMemory(role, tuple((name, size / GIB) for name, size in parts), remark)
