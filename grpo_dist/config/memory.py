"""Estimates the GPU and CPU memory of each process from the model's sizes and the settings.

The estimate is for the largest micro-batches that the settings allow, with every sequence at its maximum length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from grpo_dist.config.model_shape import ModelShape, model_config_at_hand, model_shape, reference_shape
from grpo_dist.config.placement import placement
from grpo_dist.config.rank_memory import PROCESS_GIB, MiniBatch, Parts, Rank, pass_tokens
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_roles import FSDPConfig
from grpo_dist.sizes import CPU_KV_CACHE_GIB, EXPORT_FILE_BYTES, GIB, engine_lora_rank

# Bytes of a number, by the name of its type.
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class RoleMemory:
    """Memory of one process of a role, in GiB.

    Args:
        role: actor, rollout, ref, reward_model or critic.
        parts: peak memory on the device, by purpose.
        forward: peak of a pass that computes log-probs or values (of roles that train).
        between: what stays on the GPU while other roles compute.
        host: peak CPU memory, by purpose; without GPUs this comes on top of `parts`.
        saved: what all processes of the role together write into a checkpoint.
        exported: the model that they write at the end.
        remark: explains a part that has no fixed size.
    """

    role: str
    parts: Mapping[str, float]
    forward: float = 0.0
    between: float = 0.0
    host: Mapping[str, float] = field(default_factory=dict)
    saved: float = 0.0
    exported: float = 0.0
    remark: str = ""

    @property
    def total(self) -> float:
        """Sum of `parts`, GiB."""
        return sum(self.parts.values())

    @property
    def host_total(self) -> float:
        """Sum of `host`, GiB."""
        return sum(self.host.values())


def memory_estimate(
    config: RunConfig, model_config: Mapping[str, Any] | None, num_parameters: int = 0
) -> list[RoleMemory] | None:
    """Memory of one process of each role; None if the policy's sizes are unknown.

    A teacher, the reward model and the critic are left out if their config.json is not on this machine.

    Args:
        config: the run's config.
        model_config: the model's config.json.
        num_parameters: parameters in the weight files; 0: unknown, so they are computed from config.json.
    """
    shape = None if model_config is None else model_shape(model_config, num_parameters)
    if shape is None:
        return None
    place = placement(config)
    roles = [_actor(config, shape, place.actor_world_size), _rollout(config, shape, place.tensor_parallel)]
    if place.ref_world_size and (reference := reference_shape(config, shape)) is not None:
        roles.append(_reference(config, reference, place.ref_world_size))
    if place.reward_model_world_size and (reward_model := _reward_model(config, place.reward_model_world_size)):
        roles.append(reward_model)
    if place.critic_world_size and (critic := _critic(config, place.critic_world_size)):
        roles.append(critic)
    return roles


# --- training ranks ------------------------------------------------------------------------------------------------
def _actor(config: RunConfig, shape: ModelShape, ranks: int) -> RoleMemory:
    roles, fsdp = config.actor_rollout_ref, config.actor_rollout_ref.actor.fsdp_config
    rank = Rank(
        shape,
        config.device,
        master=DTYPE_BYTES[fsdp.model_dtype],
        compute=DTYPE_BYTES[fsdp.resolved_dtype(config.default_dtype)],
        shards=fsdp.num_shards(ranks),
        reshards=fsdp.reshard_after_forward,
        factors=shape.lora_parameters(roles.model),
    )
    batch = _mini_batch(config, rank)
    states, saved, peak = rank.states, batch.saved_on_cpu, batch.peak()
    if config.trainer.val_only:  # then there are neither gradients nor states
        states, saved, peak = 0.0, 0.0, {"weights": rank.weights}
    if roles.actor.use_kl_loss and roles.actor.kl_loss_type == "full":
        peak["reference's output layer"] = (reference_shape(config, shape) or shape).matrix * rank.compute
    rollout = roles.rollout
    limit = roles.actor.log_prob_max_token_len(rollout)
    forward = rank.forward(*pass_tokens(config, "actor", rollout.log_prob_micro_batch_size_per_gpu, limit))
    host = {"stored": _stored(config, shape), "saved": saved}
    return _trained(config, "actor", rank, _offload(fsdp), states, peak, sum(forward.values()), exports=True, **host)


def _critic(config: RunConfig, ranks: int) -> RoleMemory | None:
    """None if the sizes of the critic are unknown. It has no output layer to speak of."""
    section, fsdp = config.critic, config.critic.model.fsdp_config
    found = model_config_at_hand(section.model.path)
    shape = None if found is None else model_shape({**found, **section.model.override_config})
    if shape is None:
        return None
    rank = Rank(
        replace(shape, tied=True),
        config.device,
        master=DTYPE_BYTES[fsdp.model_dtype],
        compute=DTYPE_BYTES[fsdp.resolved_dtype(config.default_dtype)],
        shards=fsdp.num_shards(ranks),
        reshards=fsdp.reshard_after_forward,
    )
    tokens, _ = pass_tokens(config, "critic", section.ppo_micro_batch_size_per_gpu, section.max_token_len)
    batch = MiniBatch(
        rank,
        tokens,
        0,
        recomputes=section.model.enable_gradient_checkpointing,
        saves_on_cpu=section.model.enable_activation_offload,
        defers=fsdp.defer_grad_sync,
        offloads=fsdp.optimizer_offload,
        has_output_layer=False,
    )
    states, saved, peak = rank.states, batch.saved_on_cpu, batch.peak()
    if config.trainer.val_only:
        states, saved, peak = 0.0, 0.0, {"weights": rank.weights}
    tokens, _ = pass_tokens(config, "critic", section.forward_micro_batch_size_per_gpu, section.forward_max_token_len)
    forward = sum(rank.forward(tokens, 0).values())
    return _trained(config, "critic", rank, _offload(fsdp), states, peak, forward, exports=False, saved=saved)


class Offload(NamedTuple):
    """Whether the weights, and the optimizer's states, wait in CPU memory between the phases of a step."""

    weights: bool
    states: bool


def _offload(fsdp: FSDPConfig) -> Offload:
    return Offload(fsdp.param_offload, fsdp.optimizer_offload)


def _trained(
    config: RunConfig,
    role: str,
    rank: Rank,
    offload: Offload,
    states: float,
    peak: Parts,
    forward: float,
    *,
    exports: bool,
    stored: float = 0.0,
    saved: float = 0.0,
) -> RoleMemory:
    """A role that trains, of which the bytes of its optimizer's states, of its peak and of a forward pass are known."""
    waits = (0.0 if offload.weights else rank.weights) + (0.0 if offload.states else states)
    # else the allocator keeps what the last phase took
    frees = offload.weights or offload.states or placement(config).sharing
    return RoleMemory(
        role,
        in_gib(peak),
        forward=(forward + (0.0 if offload.states else states)) / GIB,
        between=(waits if frees else sum(peak.values())) / GIB,
        host=host_memory(
            rank,
            offloaded=rank.weights + states - waits,
            copied=rank.weights + states,
            exports=exports,
            stored=stored,
            saved=saved,
        ),
        saved=(rank.weights + states) * rank.shards / GIB,
        exported=rank.shape.num_parameters * DTYPE_BYTES[config.export_dtype] / GIB * exports,
    )


def _mini_batch(config: RunConfig, rank: Rank) -> MiniBatch:
    actor = config.actor_rollout_ref.actor
    return MiniBatch(
        rank,
        *pass_tokens(config, "actor", actor.ppo_micro_batch_size_per_gpu, actor.max_token_len),
        recomputes=config.actor_rollout_ref.model.enable_gradient_checkpointing,
        saves_on_cpu=config.actor_rollout_ref.model.enable_activation_offload,
        entropies=actor.entropy_coeff != 0,
        defers=actor.fsdp_config.defer_grad_sync,
        offloads=actor.fsdp_config.optimizer_offload,
    )


def _reference(config: RunConfig, shape: ModelShape, ranks: int) -> RoleMemory:
    ref, actor = config.actor_rollout_ref.ref, config.actor_rollout_ref.actor
    held = DTYPE_BYTES[ref.weights_dtype(config.default_dtype)]
    compute = DTYPE_BYTES[ref.fsdp_config.resolved_dtype(config.default_dtype)]
    rank = Rank(shape, config.device, held, compute, ranks, actor.fsdp_config.reshard_after_forward, frozen=True)
    limit = actor.log_prob_max_token_len(ref)
    parts = rank.forward(*pass_tokens(config, "ref", ref.log_prob_micro_batch_size_per_gpu, limit))
    saves = config.actor_rollout_ref.ref.ref_model_sync_steps > 0
    return _follower(config, "ref", rank, parts, offloads=ref.fsdp_config.param_offload, saves=saves)


def _reward_model(config: RunConfig, ranks: int) -> RoleMemory | None:
    """None if the sizes of the reward model are unknown. It has no output layer to speak of."""
    section, actor = config.reward_model, config.actor_rollout_ref.actor
    found = model_config_at_hand(section.model.path or "")
    shape = None if found is None else model_shape(found)
    if shape is None:
        return None
    retrain, trains = section.retrain, section.is_retrained and not config.trainer.val_only
    dtype = DTYPE_BYTES[section.model.fsdp_config.resolved_dtype(config.default_dtype)]
    held = DTYPE_BYTES[retrain.model_dtype] if section.is_retrained else dtype
    reshards = actor.fsdp_config.reshard_after_forward
    rank = Rank(replace(shape, tied=True), config.device, held, dtype, ranks, reshards, frozen=not trains)
    tokens, _ = pass_tokens(config, "reward_model", section.micro_batch_size_per_gpu, section.max_token_len(actor))
    parts, offloads = rank.forward(tokens, 0), section.model.fsdp_config.param_offload
    if not trains:
        return _follower(config, "reward_model", rank, parts, offloads=offloads, saves=False)
    tokens, _ = pass_tokens(config, "reward_model", retrain.micro_batch_size_per_gpu, retrain.max_token_len_per_gpu)
    batch = MiniBatch(
        rank,
        tokens,
        0,
        recomputes=retrain.enable_gradient_checkpointing,
        defers=False,
        offloads=retrain.optimizer_offload,
        has_output_layer=False,
    )
    offload, forward = Offload(offloads, retrain.optimizer_offload), sum(parts.values())
    return _trained(config, "reward_model", rank, offload, rank.states, batch.peak(), forward, exports=False)


def _follower(config: RunConfig, role: str, rank: Rank, parts: Parts, *, offloads: bool, saves: bool) -> RoleMemory:
    """A role that only runs forward passes."""
    total = sum(parts.values()) / GIB
    host = host_memory(
        rank, offloaded=rank.weights if offloads else 0.0, copied=rank.weights if saves else 0.0, exports=False
    )
    between = 0.0 if offloads else rank.weights / GIB if placement(config).sharing else total
    return RoleMemory(role, in_gib(parts), total, between, host, saved=rank.weights * rank.shards / GIB * saves)


# --- rollout engines -----------------------------------------------------------------------------------------------
def _rollout(config: RunConfig, shape: ModelShape, tensor_parallel: int) -> RoleMemory:
    rollout, size = config.actor_rollout_ref.rollout, DTYPE_BYTES[_rollout_dtype(config)]
    weights = shape.num_parameters * size / tensor_parallel
    parts = {"weights": weights} | _engine_factors(config, shape)
    if config.device == "cuda":
        per_token = (4 * shape.hidden + 3 * shape.width / tensor_parallel + shape.copies) * size
        sampler = 3 * 4 * rollout.max_num_seqs * shape.vocabulary
        whole = 0 if rollout.enable_chunked_prefill else config.max_model_len  # a pass then holds the longest sequence
        parts["pass"] = max(rollout.max_num_batched_tokens, whole) * per_token + sampler
    host = {"weights being loaded": shape.largest * 4.0, "new weights": _bucket(config, shape)}
    if rollout.free_cache_engine and placement(config).shares_gpu:
        host["weights while it sleeps"] = weights
    host["process"] = PROCESS_GIB[config.device] * GIB
    gib, share = _kv_cache_gib(config), rollout.gpu_memory_utilization
    if gib is not None:
        return RoleMemory("rollout", in_gib(parts | {"KV cache": gib * GIB}), host=in_gib(host))
    longest = config.max_model_len * _kv_bytes(config, shape)
    parts["KV cache of one sequence"] = longest
    return RoleMemory(
        "rollout", in_gib(parts), host=in_gib(host), remark=f"KV cache: what is left of {share:.0%} of the GPU"
    )


def _engine_factors(config: RunConfig, shape: ModelShape) -> dict[str, float]:
    """Bytes of LoRA's factors on a GPU of an engine that computes with them; each process has at most all of them."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if not config.sends_factors:
        return {}
    rank = engine_lora_rank(model.lora_rank)
    parts = {
        "LoRA's factors": shape.lora_parameters(model) * rank / model.lora_rank * DTYPE_BYTES[_rollout_dtype(config)]
    }
    if config.device == "cpu":  # vLLM's code for CPU copies a layer's factors for every token of a pass
        tokens = max(rollout.max_num_batched_tokens, config.max_model_len)
        parts["factors of each token"] = 4.0 * tokens * rank * max(shape.hidden, shape.query_width, shape.width)
    return parts


def kv_cache_tokens(config: RunConfig, model_config: Mapping[str, Any] | None) -> int | None:
    """Tokens that fit in the KV cache of one engine; None if vLLM determines the cache size when it starts."""
    shape = None if model_config is None else model_shape(model_config)
    gib = _kv_cache_gib(config)
    return None if shape is None or gib is None else int(gib * GIB / _kv_bytes(config, shape))


def _kv_bytes(config: RunConfig, shape: ModelShape) -> float:
    """KV-cache bytes of one token on one GPU of an engine."""
    return shape.kv_values_per_token * DTYPE_BYTES[_rollout_dtype(config)] / placement(config).tensor_parallel


def _kv_cache_gib(config: RunConfig) -> float | None:
    asked = config.actor_rollout_ref.rollout.kv_cache_memory_gib
    return CPU_KV_CACHE_GIB if asked is None and config.device == "cpu" else asked


def _rollout_dtype(config: RunConfig) -> str:
    return config.actor_rollout_ref.rollout.resolved_dtype(config.default_dtype)


# --- CPU memory ----------------------------------------------------------------------------------------------------
def host_memory(
    rank: Rank, *, offloaded: float, copied: float, exports: bool, stored: float = 0.0, saved: float = 0.0
) -> dict[str, float]:
    """CPU memory of a rank, GiB: offloaded tensors, plus the largest of what loading, saving and export need.

    Args:
        rank: the rank.
        offloaded: bytes that wait in CPU memory.
        copied: bytes of the copy from which a checkpoint is written.
        exports: whether rank 0 writes a Hugging Face folder.
        stored: bytes that rank 0 puts into the object store.
        saved: bytes of activations that wait for the backward pass. Pinned memory is kept when they are gone.
    """
    shape = rank.shape
    loading = shape.largest * rank.master + (rank.weights if rank.device == "cuda" else 0.0)
    moments = {"weights being loaded": loading, "a copy for a checkpoint": copied}
    if exports:
        file = max(EXPORT_FILE_BYTES, shape.largest * rank.master)
        moments["export"] = min(file, shape.num_parameters * rank.master)
        moments["weights in the object store"] = stored
    largest = max(moments, key=lambda name: moments[name])
    parts = {"offloaded": offloaded, "activations": saved, largest: moments[largest]}
    return in_gib({name: size for name, size in parts.items() if size} | {"process": PROCESS_GIB[rank.device] * GIB})


def _stored(config: RunConfig, shape: ModelShape) -> float:
    """Bytes of what the engines get in Ray's object store, if the weight sync uses it."""
    engine, place = config.actor_rollout_ref.rollout.checkpoint_engine, placement(config)
    through = engine.resolved_backend(config.device, shares_gpu=place.shares_gpu) == "object_store"
    return _num_sent(config, shape) * DTYPE_BYTES[_rollout_dtype(config)] if through else 0.0


def _num_sent(config: RunConfig, shape: ModelShape) -> int:
    """Numbers that a weight sync sends."""
    return shape.lora_parameters(config.actor_rollout_ref.model) if config.sends_factors else shape.num_parameters


def _bucket(config: RunConfig, shape: ModelShape) -> float:
    """Bytes of the buckets of new weights that an engine holds during a weight sync."""
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    if config.sends_factors:  # what arrives, its buckets, what is in force, and vLLM's own
        return 4.0 * _num_sent(config, shape) * DTYPE_BYTES[_rollout_dtype(config)]
    largest = shape.largest * DTYPE_BYTES[_rollout_dtype(config)]
    return 2.0 * max(engine.update_weights_bucket_megabytes << 20, largest) if _stored(config, shape) else 0.0


def in_gib(parts: Mapping[str, float]) -> dict[str, float]:
    """Bytes as GiB."""
    return {name: size / GIB for name, size in parts.items()}
