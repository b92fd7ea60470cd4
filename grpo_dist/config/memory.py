"""Memory of each process, estimated from the model's config.json.

Counts weights, gradients, optimizer states, gathered layers, KV cache, and the activations of the largest pass that the
settings allow. Not the CUDA context, fragmentation, or Python itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_dist.assets import BUILTIN, resolve_model_path
from grpo_dist.assets.paths import expanded, is_folder
from grpo_dist.config.placement import placement
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_roles import ModelConfig
from grpo_dist.errors import ConfigError

GIB = 2**30
ADAM_STATES = 2  # AdamW's two running means, in the type of the weights
CPU_KV_CACHE_GIB = 1.0  # the engine's own choice where kv_cache_memory_gib is null; a test keeps the two equal
CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}  # engines/head.py's, which needs torch; a test keeps the two equal
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_BYTES = {"fp32": 4, "bf16": 2, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """Parameters of a model, and the sizes that memory depends on.

    Args:
        num_parameters: all of them; tied embeddings once.
        largest_unit: parameters that FSDP gathers at a time: a layer, or embedding and head.
        kv_values_per_token: keys and values of one token in all layers.
        layer_values_per_token: what a layer keeps of a token for its backward pass: inputs of the norms and of each
            matrix, gate and up projections and their product.
        layer_input: what it keeps with gradient checkpointing: the hidden size.
        num_layers: decoder layers.
        linears: inputs + outputs of a layer's matrices, by the names that LoRA's target_modules give them.
    """

    num_parameters: int
    largest_unit: int
    kv_values_per_token: int
    layer_values_per_token: int
    layer_input: int
    num_layers: int
    linears: Mapping[str, int]

    def lora_parameters(self, model: ModelConfig) -> int:
        """Numbers in LoRA's factors."""
        chosen = self.linears if "all-linear" in model.target_modules else model.target_modules
        names = set(chosen) - set(model.exclude_modules or ())
        return self.num_layers * model.lora_rank * sum(self.linears.get(name, 0) for name in names)


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
    """The model's config.json: built in, in a local folder, in the hub's cache, or of known_models.json.

    Nothing is downloaded. The known ones hold only what `model_shape` needs; a name matches whoever its owner is.
    """
    try:
        folder = expanded(resolve_model_path(path) if path.startswith(BUILTIN) else path)
    except ConfigError:
        return None
    for candidate in (folder, *_cached_snapshots(path)):
        try:
            found = json.loads((candidate / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    known = json.loads(Path(__file__).with_name("known_models.json").read_text(encoding="utf-8"))
    return {name.rpartition("/")[2].lower(): entry for name, entry in known.items()}.get(folder.name.lower())


def _cached_snapshots(path: str) -> list[Path]:
    home = expanded(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    folder = cache / f"models--{path.replace('/', '--')}" / "snapshots"
    return sorted(folder.iterdir()) if path.count("/") == 1 and is_folder(folder) else []


def model_shape(model_config: dict[str, Any]) -> ModelShape | None:
    """Sizes of a Llama-like decoder (grouped-query attention, gated MLP, also experts); None for others."""
    text = model_config.get("text_config", model_config)
    needed = [_count(text, name) for name in _SIZES]
    if not all(needed):
        return None
    hidden, layers, heads, width, vocabulary = needed
    kv_heads = _count(text, "num_key_value_heads") or heads
    head_dim = _count(text, "head_dim") or hidden // heads
    experts = _count(text, "num_experts") or _count(text, "num_local_experts") or 1
    expert_width = _count(text, "moe_intermediate_size") or width
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    mlp = 3 * hidden * expert_width * experts + (hidden * experts if experts > 1 else 0)
    layer = attention + mlp + 2 * hidden
    embedding = vocabulary * hidden * (1 if text.get("tie_word_embeddings") else 2)
    return ModelShape(
        num_parameters=layers * layer + embedding + hidden,
        largest_unit=max(layer, embedding),
        kv_values_per_token=2 * layers * kv_heads * head_dim,
        layer_values_per_token=4 * hidden + 2 * head_dim * (heads + kv_heads) + 4 * width,
        layer_input=hidden,
        num_layers=layers,
        linears={
            "q_proj": hidden + head_dim * heads,
            "k_proj": hidden + head_dim * kv_heads,
            "v_proj": hidden + head_dim * kv_heads,
            "o_proj": head_dim * heads + hidden,
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), experts * (hidden + expert_width)),
        },
    )


def _count(text: Any, name: str) -> int:
    """A size in a config.json; 0 where it has none, or something else in its place."""
    value = text.get(name) if isinstance(text, dict) else None
    return value if isinstance(value, int) and value > 0 else 0


def memory_estimate(config: RunConfig, model_config: dict[str, Any] | None) -> list[RoleMemory] | None:
    """Memory of one process of each role, in GiB; None if the model's sizes are not at hand."""
    shape = None if model_config is None else model_shape(model_config)
    if shape is None:
        return None
    place = placement(config)
    roles = [_actor(config, shape, place.actor_world_size), _rollout(config, shape, place.tensor_parallel)]
    if place.ref_world_size:
        compute = _BYTES[config.actor_rollout_ref.ref.fsdp_config.resolved_dtype(config.default_dtype)]
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
    master, compute = _BYTES[fsdp.model_dtype], _BYTES[fsdp.resolved_dtype(config.default_dtype)]
    ranks = ranks if fsdp.fsdp_size < 0 else fsdp.fsdp_size
    factors = shape.lora_parameters(config.actor_rollout_ref.model)
    trained = (factors or shape.num_parameters) * master / ranks
    weights = (shape.num_parameters + factors) * master / ranks
    parts = [("weights", weights), ("gradients", trained), ("optimizer", ADAM_STATES * trained)]
    if ranks > 1 and fsdp.reshard_after_forward:
        parts.append(("gathered layer", shape.largest_unit * compute))
    elif ranks > 1 or master != compute:
        parts.append(("gathered model", shape.num_parameters * compute))
    parts.append(("activations", _activations(config, shape) * compute))
    copy = (weights + ADAM_STATES * trained) / GIB
    return _role("actor", parts, f"{copy:.3g} GiB of CPU memory more while a checkpoint is written")


def tokens_per_pass(config: RunConfig) -> int:
    """Tokens of the largest training pass on one rank: its budget, or the longest sequences laid out as configured."""
    roles, data = config.actor_rollout_ref, config.data
    sequences, n = roles.actor.ppo_micro_batch_size_per_gpu, roles.rollout.n
    if roles.actor.use_dynamic_bsz:
        return roles.actor.ppo_max_token_len_per_gpu
    shared = roles.model.use_remove_padding and roles.actor.use_prefix_grouper
    prompts = -(-sequences // n) if shared else sequences
    return prompts * data.max_prompt_length + sequences * data.max_response_length


def _activations(config: RunConfig, shape: ModelShape) -> float:
    """Numbers that a training pass keeps: every layer's, or every layer's input and one layer's; and chunks of logits.

    The output layer holds a chunk's logits, their softmax and their gradient in float32, which fills two of the compute
    type each.
    """
    per_layer = shape.layer_values_per_token
    if config.actor_rollout_ref.model.enable_gradient_checkpointing:
        per_token = shape.num_layers * shape.layer_input + per_layer
    else:
        per_token = shape.num_layers * per_layer
    compute = _BYTES[config.actor_rollout_ref.actor.fsdp_config.resolved_dtype(config.default_dtype)]
    return tokens_per_pass(config) * per_token + 3 * CHUNK_LOGITS[config.device] * 4 / compute


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
    return _BYTES[config.actor_rollout_ref.rollout.resolved_dtype(config.default_dtype)]


def _role(role: str, parts: list[tuple[str, float]], remark: str = "") -> RoleMemory:
    return RoleMemory(role, tuple((name, size / GIB) for name, size in parts), remark)
