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

from grpo_dist.config.model_shape import ModelShape, model_config_at_hand, model_shape, reference_shape
from grpo_dist.config.placement import Placement, placement
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_roles import FSDPConfig
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
    if config.needs_reference and (reference := reference_shape(config, shape)) is not None:
        ranks, ref = place.ref_world_size or place.actor_world_size, config.actor_rollout_ref.ref
        phases["reference"] = _Work(config, reference).log_probs(ranks, ref.log_prob_micro_batch_size_per_gpu)
    if config.needs_old_log_probs:
        size = config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        phases["old log-probs"] = work.log_probs(place.actor_world_size, size)
    scorer = model_config_at_hand(config.reward_model.model.path or "") if place.reward_model_world_size else None
    if scorer is not None and (scorer_shape := model_shape(scorer)) is not None:
        size = config.reward_model.micro_batch_size_per_gpu
        phases["reward model"] = _Work(config, scorer_shape).log_probs(place.reward_model_world_size, size)
    critic = model_config_at_hand(config.critic.model.path) if place.critic_world_size else None
    if critic is not None and (critic_shape := model_shape(critic)) is not None:
        phases |= _critic(config, place, _Work(config, critic_shape))
    phases["weight sync"] = work.weight_sync(place)
    return _composed(config, place, phases)


def _critic(config: RunConfig, place: Placement, work: _Work) -> dict[str, float]:
    """Seconds of the critic's two phases."""
    section, ranks = config.critic, place.critic_world_size
    training = _Training(
        ranks,
        section.model.fsdp_config,
        section.ppo_mini_batch_size,
        section.ppo_micro_batch_size_per_gpu,
        section.max_token_len,
        section.ppo_epochs,
        recomputes=section.model.enable_gradient_checkpointing,
    )
    return {
        "values": work.log_probs(ranks, section.forward_micro_batch_size_per_gpu),
        "critic update": work.training(training),
    }


def _composed(config: RunConfig, place: Placement, phases: Mapping[str, float]) -> StepEstimate:
    """Combine overlapping phases: log-probs overlap generation; with `max_staleness`, generation overlaps the rest."""
    generation = phases["generation"]
    names = {"ref": "reference", "reward_model": "reward model", "critic": "values"}
    # the followers with GPUs of their own; the others compute on the actor's
    apart = [role for role in names if place.world_sizes[role] and place.colocate == "separate"]
    beside = [name for role, name in names.items() if role not in apart]
    own = {role: phases.get(names[role], 0.0) for role in apart}
    log_probs = sum(phases.get(name, 0.0) for name in ("old log-probs", *beside))
    if place.shares_gpu:
        return StepEstimate(phases, sum(phases.values()), {})
    critic, sync = phases.get("critic update", 0.0), phases["weight sync"]
    updates = phases["update"] + critic  # one after the other
    if config.trainer.max_staleness:
        total = max(generation + sync, log_probs + updates + sync, *own.values())
    else:
        total = max(generation, log_probs, *own.values()) + updates + sync
    trains = log_probs + phases["update"] + (0.0 if "critic" in own else critic)
    busy = {"actor": trains, "rollout": generation} | own
    if "critic" in own:
        busy["critic"] += critic
    return StepEstimate(phases, total, {role: 1 - seconds / total for role, seconds in busy.items()})


@dataclass(frozen=True)
class _Training:
    """How a role trains: its ranks, how they hold the weights, the size of its batches, and what a pass costs."""

    ranks: int
    fsdp: FSDPConfig
    mini_batch: int
    micro_batch: int
    max_token_len: int | None
    epochs: int
    recomputes: bool
    all_weights: bool = True


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
        passes = self._passes(self.sequences / ranks, micro_batch, self.config.actor_rollout_ref.actor.max_token_len)
        return max(self.tokens / ranks * self.forward / FLOPS, passes * self._exchange(ranks, self.bytes))

    def update(self, place: Placement) -> float:
        """Seconds of forward and backward: no weight gradients with LoRA, one more forward with checkpointing."""
        roles, actor = self.config.actor_rollout_ref, self.config.actor_rollout_ref.actor
        training = _Training(
            place.actor_world_size,
            actor.fsdp_config,
            actor.ppo_mini_batch_size,
            actor.ppo_micro_batch_size_per_gpu,
            actor.max_token_len,
            actor.ppo_epochs,
            recomputes=roles.model.enable_gradient_checkpointing,
            all_weights=not roles.model.lora_rank,
        )
        return self.training(training)

    def training(self, training: _Training) -> float:
        """Seconds of the optimizer steps of a training step."""
        ranks = training.ranks
        times = 2 + training.all_weights + training.recomputes
        steps = self.config.data.train_batch_size // training.mini_batch
        passes = steps * self._passes(self.sequences / steps / ranks, training.micro_batch, training.max_token_len)
        gradients = 2 * self.bytes * training.all_weights  # reduced in float32
        exchanged = passes * self._exchange(training.fsdp.num_shards(ranks), 2 * self.bytes + gradients)
        return training.epochs * max(times * self.tokens / ranks * self.forward / FLOPS, exchanged)

    def weight_sync(self, place: Placement) -> float:
        """Seconds to send all weights once."""
        engine = self.config.actor_rollout_ref.rollout.checkpoint_engine
        return self.bytes / SYNC[engine.resolved_backend(place.device, shares_gpu=place.shares_gpu)]

    def _passes(self, sequences: float, micro_batch: int, limit: int | None) -> int:
        per_pass = micro_batch if limit is None else max(1.0, limit / (self.tokens / self.sequences))
        return ceil(sequences / per_pass)

    def _exchange(self, ranks: int, size: float) -> float:
        """Seconds of an all-gather of `size` bytes over `ranks` ranks."""
        within = ranks <= self.config.trainer.n_gpus_per_node
        return 0.0 if ranks == 1 else size * (ranks - 1) / ranks / (NVLINK if within else NETWORK)
