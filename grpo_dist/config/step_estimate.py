"""A rough estimate of how long each phase of a step takes on GPUs, and which role waits.

It divides the FLOPs and bytes of each phase by the rates that such phases usually reach on an H100. On other GPUs all
phases slow down about equally, so their proportions and the waiting shares still hold. Prompts and responses are
assumed to have half their maximum length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from grpo_dist.config.model_shape import ModelShape, model_config_at_hand, model_shape
from grpo_dist.config.placement import Placement, placement
from grpo_dist.config.schema import RunConfig
from grpo_dist.sizes import GIB

# An H100 (80 GB): the usual fraction of 989 TFLOP/s in bf16, and of 3.35 TB/s.
GPU_GIB = 79.0
FLOPS, BANDWIDTH = 0.4 * 989e12, 0.6 * 3.35e12
# Bytes per second that a GPU exchanges within its machine, and with other machines (400 Gbit/s per GPU).
NVLINK, NETWORK = 300e9, 40e9
# Bytes per second of a weight sync, by `checkpoint_engine.backend`.
SYNC = {"broadcast": 40e9, "ipc": 40e9, "object_store": 0.35e9}
DECODE_OVERHEAD_S = 0.005  # per engine step, besides its kernels
_BF16 = 2


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of a step.

    Attributes:
        phases: seconds by phase; some phases overlap.
        total: seconds of the whole step.
        waiting: by role, the share of the step in which its GPUs are idle; {} if the engines share the actor's GPUs.
    """

    phases: Mapping[str, float]
    total: float
    waiting: Mapping[str, float]


def step_estimate(config: RunConfig, model_config: Mapping[str, Any] | None) -> StepEstimate | None:
    """Estimate a training step; None on CPU, or if the model's sizes are unknown.

    Args:
        config: the run's config.
        model_config: the model's config.json.
    """
    shape = None if model_config is None else model_shape(model_config)
    if shape is None or config.device == "cpu":
        return None
    place, work = placement(config), _Work(config, shape)
    phases = {"generation": work.generation(place), "update": work.update(place)}
    if config.needs_reference:
        ranks, ref = place.ref_world_size or place.actor_world_size, config.actor_rollout_ref.ref
        phases["reference"] = work.log_probs(ranks, ref.log_prob_micro_batch_size_per_gpu)
    if config.needs_old_log_probs:
        size = config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        phases["old log-probs"] = work.log_probs(place.actor_world_size, size)
    scorer = model_config_at_hand(config.reward_model.model.path or "") if place.reward_model_world_size else None
    if scorer is not None and (scorer_shape := model_shape(scorer)) is not None:
        size = config.reward_model.micro_batch_size_per_gpu
        phases["reward model"] = _Work(config, scorer_shape).log_probs(place.reward_model_world_size, size)
    phases["weight sync"] = work.weight_sync(place)
    return _composed(config, place, phases)


def _composed(config: RunConfig, place: Placement, phases: Mapping[str, float]) -> StepEstimate:
    """Combine overlapping phases: log-probs overlap generation; with `max_staleness`, generation overlaps the rest."""
    generation, names = phases["generation"], {"ref": "reference", "reward_model": "reward model"}
    # the followers with GPUs of their own; the others compute on the actor's
    apart = [role for role in names if place.world_sizes[role] and place.colocate == "separate"]
    beside = [name for role, name in names.items() if role not in apart]
    own = {role: phases.get(names[role], 0.0) for role in apart}
    log_probs = sum(phases.get(name, 0.0) for name in ("old log-probs", *beside))
    if place.shares_gpu:
        return StepEstimate(phases, sum(phases.values()), {})
    trains, sync = log_probs + phases["update"], phases["weight sync"]
    if config.trainer.max_staleness:
        total = max(generation + sync, trains + sync, *own.values())
    else:
        total = max(generation, log_probs, *own.values()) + phases["update"] + sync
    busy = {"actor": trains, "rollout": generation} | own
    return StepEstimate(phases, total, {role: 1 - seconds / total for role, seconds in busy.items()})


class _Work:
    """FLOPs and bytes of a step."""

    def __init__(self, config: RunConfig, shape: ModelShape) -> None:
        roles, data = config.actor_rollout_ref, config.data
        self.config, self.shape = config, shape
        self.prompt, self.response = data.max_prompt_length / 2, data.max_response_length / 2
        self.prompts, self.sequences = data.train_batch_size, data.train_batch_size * roles.rollout.n
        self.tokens = self.sequences * self.response + self.prompt * (
            self.prompts if roles.shares_prompts else self.sequences
        )
        matrices = shape.num_layers * shape.active + shape.matrix
        attention = shape.num_layers * shape.query_width * (self.prompt + self.response)
        self.met = float(matrices * _BF16)  # bytes of the weights that one token uses
        self.forward = 2.0 * matrices + 2.0 * attention  # FLOPs per token
        self.bytes = float(shape.num_parameters * _BF16)

    def generation(self, place: Placement) -> float:
        """Seconds of prefill, of decoding as many sequences as fit the KV cache, and of the longest one's tail."""
        rollout, gpus = self.config.actor_rollout_ref.rollout, place.tensor_parallel
        kv = self.shape.kv_values_per_token * _BF16 * (self.prompt + self.response)  # per sequence
        memory = (self.config.cluster.gpu_memory_gib or GPU_GIB) * GIB * rollout.gpu_memory_utilization * gpus
        cache = memory - self.bytes if rollout.kv_cache_memory_gib is None else rollout.kv_cache_memory_gib * GIB * gpus
        sequences = self.sequences / place.num_engines
        at_once = max(1.0, min(rollout.max_num_seqs, sequences, cache / kv))

        def step(running: float) -> float:
            read = min(self.bytes, running * self.met) if self.shape.copies else self.bytes  # only the experts in use
            reading, computing = (read + running * kv) / BANDWIDTH, running * self.forward / FLOPS
            return max(reading, computing) / gpus + DECODE_OVERHEAD_S

        prefill = self.prompts / place.num_engines * self.prompt * self.forward / (gpus * FLOPS)
        longest = (self.config.data.max_response_length - self.response) * step(1.0)
        return prefill + sequences * self.response / at_once * step(at_once) + longest

    def log_probs(self, ranks: int, micro_batch: int) -> float:
        """Seconds of a forward pass over all sequences, with one all-gather of the weights per micro-batch."""
        passes = self._passes(self.sequences / ranks, micro_batch)
        return max(self.tokens / ranks * self.forward / FLOPS, passes * self._exchange(ranks, self.bytes))

    def update(self, place: Placement) -> float:
        """Seconds of forward and backward: no weight gradients with LoRA, one more forward with checkpointing."""
        roles, ranks = self.config.actor_rollout_ref, place.actor_world_size
        times = (2 if roles.model.lora_rank else 3) + roles.model.enable_gradient_checkpointing
        steps = self.config.data.train_batch_size // roles.actor.ppo_mini_batch_size
        passes = steps * self._passes(self.sequences / steps / ranks, roles.actor.ppo_micro_batch_size_per_gpu)
        gradients = 0.0 if roles.model.lora_rank else 2 * self.bytes  # reduced in float32
        shards = roles.actor.fsdp_config.num_shards(ranks)
        exchanged = passes * self._exchange(shards, 2 * self.bytes + gradients)
        return roles.actor.ppo_epochs * max(times * self.tokens / ranks * self.forward / FLOPS, exchanged)

    def weight_sync(self, place: Placement) -> float:
        """Seconds to send all weights once."""
        engine = self.config.actor_rollout_ref.rollout.checkpoint_engine
        return self.bytes / SYNC[engine.resolved_backend(place.device, shares_gpu=place.shares_gpu)]

    def _passes(self, sequences: float, micro_batch: int) -> int:
        limit = self.config.actor_rollout_ref.actor.max_token_len
        per_pass = micro_batch if limit is None else max(1.0, limit / (self.tokens / self.sequences))
        return ceil(sequences / per_pass)

    def _exchange(self, ranks: int, size: float) -> float:
        """Seconds of an all-gather of `size` bytes over `ranks` ranks."""
        within = ranks <= self.config.trainer.n_gpus_per_node
        return 0.0 if ranks == 1 else size * (ranks - 1) / ranks / (NVLINK if within else NETWORK)
