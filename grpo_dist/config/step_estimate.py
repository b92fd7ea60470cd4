"""An estimate of how long each phase of a step takes, and of which role waits.

The FLOPs, bytes and calls of each phase are divided by the machine's rates (step_rates.py). Responses have the length
that is expected (`trainer.expected_response_length`), or their maximum; prompts half of theirs. The reward function is
not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from grpo_dist.config.memory import DTYPE_BYTES
from grpo_dist.config.model_shape import ModelShape, model_config_at_hand, model_shape, reference_shape
from grpo_dist.config.placement import Placement, placement
from grpo_dist.config.processor import physical_cores
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_roles import FSDPConfig
from grpo_dist.config.step_rates import MachineRates, PassRates, Rates
from grpo_dist.sizes import CPU_KV_CACHE_GIB, GIB, KV_BLOCK_TOKENS, PASSES

GPU_GIB = 79.0  # of an H100 (80 GB)
NETWORK = 40e9  # bytes per second that a GPU exchanges with other machines (400 Gbit/s)
# Bytes that AdamW, clipping and zeroing move for each trained number: read p, g, m, v, write p, m, v, twice g.
OPTIMIZER_BYTES = 36.0


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of a step.

    Attributes:
        phases: seconds by phase; some phases overlap.
        beyond: seconds that log-probs and the reward model take beyond generation.
        total: seconds of the whole step.
        waiting: by role, the share of the step in which its processes are idle; {} if the engines share the actor's
            GPUs.
    """

    phases: Mapping[str, float]
    beyond: float
    total: float
    waiting: Mapping[str, float]


def step_estimate(
    config: RunConfig, model_config: Mapping[str, Any] | None, machine: MachineRates | None
) -> StepEstimate | None:
    """Estimate a training step; None if the model's sizes or the machine's rates are unknown.

    Args:
        config: the run's config.
        model_config: the model's config.json.
        machine: the rates of the machine.
    """
    shape = None if model_config is None else model_shape(model_config)
    if shape is None or machine is None:
        return None
    place = placement(config)
    work, rates = _Work(config, shape), _rates(config, place, machine)
    phases = {
        "generation": work.generation(place, rates["rollout"]),
        "update": work.update(place, rates["actor"]),
    }
    if config.needs_reference and (reference := reference_shape(config, shape)) is not None:
        role = "ref" if place.ref_world_size else "actor"
        size = config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
        phases["reference"] = _Work(config, reference).log_probs(place, role, size, rates[role])
    if config.needs_old_log_probs:
        size = config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        phases["old log-probs"] = work.log_probs(place, "actor", size, rates["actor"])
    scorer = model_config_at_hand(config.reward_model.model.path or "") if place.reward_model_world_size else None
    if scorer is not None and (scorer_shape := model_shape(scorer)) is not None:
        size, rate = config.reward_model.micro_batch_size_per_gpu, rates["reward_model"]
        phases["reward model"] = _Work(config, scorer_shape).log_probs(place, "reward_model", size, rate)
    critic = model_config_at_hand(config.critic.model.path) if place.critic_world_size else None
    if critic is not None and (critic_shape := model_shape(critic)) is not None:
        phases |= _critic(config, place, _Work(config, critic_shape), rates["critic"])
    phases["weight sync"] = work.weight_sync(place, rates["rollout"])
    if machine.driver_s:
        phases["driver"] = work.sequences * machine.driver_s
    return _composed(config, place, phases, work.waves(place))


def _rates(config: RunConfig, place: Placement, machine: MachineRates) -> dict[str, Rates]:
    """The rates of each role's processes, by their threads and the type that they compute in."""
    roles, default = config.actor_rollout_ref, config.default_dtype
    dtypes = {
        "actor": roles.actor.fsdp_config.resolved_dtype(default),
        "rollout": "fp32" if roles.rollout.resolved_dtype(default) == "float32" else "bf16",
        "ref": roles.ref.fsdp_config.resolved_dtype(default),
        "reward_model": config.reward_model.model.fsdp_config.resolved_dtype(default),
        "critic": config.critic.model.fsdp_config.resolved_dtype(default),
    }
    return {role: machine.of(place.num_threads.get(role, 1), dtype) for role, dtype in dtypes.items()}


def _critic(config: RunConfig, place: Placement, work: _Work, rates: Rates) -> dict[str, float]:
    """Seconds of the critic's two phases."""
    section = config.critic
    training = _Training(
        place.critic_world_size,
        config.sequence_parallel_size("critic"),
        section.model.fsdp_config,
        section.ppo_mini_batch_size,
        section.ppo_micro_batch_size_per_gpu,
        section.max_token_len,
        section.ppo_epochs,
        recomputes=section.model.enable_gradient_checkpointing,
    )
    return {
        "values": work.log_probs(place, "critic", section.forward_micro_batch_size_per_gpu, rates),
        "critic update": work.training(training, rates),
    }


def _composed(config: RunConfig, place: Placement, phases: Mapping[str, float], waves: int) -> StepEstimate:
    """Combine overlapping phases.

    Log-probs and the reward model follow generation in passes, each once its share of the groups is there; with
    `max_staleness`, generation overlaps the rest. Processes that need more threads than there are cores gain nothing.
    """
    generation = phases["generation"]
    names = {"ref": "reference", "reward_model": "reward model", "critic": "values"}
    # the followers with processors of their own; the others compute on the actor's
    apart = [role for role in names if place.world_sizes[role] and place.colocate == "separate"]
    beside = [name for role, name in names.items() if role not in apart]
    own = {role: phases.get(names[role], 0.0) for role in apart}
    log_probs = sum(phases.get(name, 0.0) for name in ("old log-probs", *beside))
    critic, sync, driver = phases.get("critic update", 0.0), phases["weight sync"], phases.get("driver", 0.0)
    updates = phases["update"] + critic  # one after the other
    followers = [log_probs, *own.values()]
    if place.shares_gpu or _crowded(config, place):
        beyond = sum(followers)
    else:
        beyond = max(_end(generation, seconds, waves) for seconds in followers) - generation
    total = generation + beyond + updates + sync + driver
    if config.trainer.max_staleness and not (place.shares_gpu or _crowded(config, place)):
        total = driver + max(generation + sync, log_probs + updates + sync, *own.values())
    if place.shares_gpu:
        return StepEstimate(phases, beyond, total, {})
    trains = log_probs + phases["update"] + (0.0 if "critic" in own else critic)
    busy = {"actor": trains, "rollout": generation} | own
    if "critic" in own:
        busy["critic"] += critic
    return StepEstimate(phases, beyond, total, {role: 1 - seconds / total for role, seconds in busy.items()})


def _crowded(config: RunConfig, place: Placement) -> bool:
    """Whether engines and followers on CPU have more threads than there are cores, so that they take turns."""
    roles = ("rollout", "actor" if config.trainer.max_staleness or config.needs_old_log_probs else "ref")
    threads = sum(place.world_sizes[role] * place.num_threads.get(role, 1) for role in roles)
    return place.device == "cpu" and threads > physical_cores() * config.trainer.nnodes


def _end(generation: float, seconds: float, waves: int) -> float:
    """When passes of `seconds` together end that follow generation in so many waves."""
    end = 0.0
    for share in range(1, PASSES + 1):
        ready = generation * ceil(share / PASSES * waves) / waves
        end = max(end, ready) + seconds / PASSES
    return end


@dataclass(frozen=True)
class _Training:
    """How a role trains: its ranks, how many split a sequence, how they hold the weights, the size of its batches, and
    what a pass costs.
    """

    ranks: int
    split: int
    fsdp: FSDPConfig
    mini_batch: int
    micro_batch: int
    max_token_len: int | None
    epochs: int
    recomputes: bool
    trained: float | None = None  # numbers, where not all of them are


class _Work:
    """FLOPs and bytes of a step."""

    def __init__(self, config: RunConfig, shape: ModelShape) -> None:
        roles, data = config.actor_rollout_ref, config.data
        self.config, self.shape = config, shape
        self.prompt = data.max_prompt_length / 2
        self.response = float(config.trainer.expected_response_length or data.max_response_length)
        self.prompts, self.sequences = data.train_batch_size, data.train_batch_size * roles.rollout.n
        groups = self.prompts if roles.shares_prompts else self.sequences
        responses = self.sequences * self.response
        self.tokens = responses + self.prompt * groups
        self.layers = shape.num_layers * shape.active  # matrices that a token meets
        self.products = 2.0 * (self.layers * self.tokens + shape.matrix * responses)
        pairs = groups * self.prompt**2 / 2 + responses * (self.prompt + self.response / 2)
        self.attention = 4.0 * shape.num_layers * shape.query_width * pairs
        self.number = DTYPE_BYTES[roles.rollout.resolved_dtype(config.default_dtype)]  # bytes, in engines
        self.bytes = float(shape.num_parameters * self.number)

    def at_once(self, place: Placement) -> float:
        """Sequences that an engine decodes at once, as its KV cache has room for them."""
        rollout, gpus = self.config.actor_rollout_ref.rollout, place.tensor_parallel
        memory = (self.config.cluster.gpu_memory_gib or GPU_GIB) * GIB * rollout.gpu_memory_utilization * gpus
        given = rollout.kv_cache_memory_gib or (CPU_KV_CACHE_GIB if place.device == "cpu" else None)
        cache = memory - self.bytes if given is None else given * GIB * gpus
        return max(
            1.0,
            min(
                rollout.max_num_seqs, self.sequences / place.num_engines, cache / self._kv(self.prompt + self.response)
            ),
        )

    def waves(self, place: Placement) -> int:
        """How many times the engines are filled with sequences."""
        return ceil(self.sequences / place.num_engines / self.at_once(place))

    def _kv(self, tokens: float) -> float:
        """Bytes of the KV cache of so many tokens."""
        return self.shape.kv_values_per_token * self.number * tokens

    def generation(self, place: Placement, rates: Rates) -> float:
        """Seconds of prefill, of decoding as many sequences as fit the KV cache, and of the longest one's tail."""
        gpus, shape, decode = place.tensor_parallel, self.shape, rates.decode
        sequences, at_once = self.sequences / place.num_engines, self.at_once(place)
        weights = (self.layers + shape.matrix) * self.number  # that one token uses

        def step(running: float) -> float:
            read = min(self.bytes, running * weights) if shape.copies else self.bytes  # only the experts in use
            computing = running * 2.0 * (self.layers + shape.matrix) / rates.forward.rate(shape.hidden)
            kernels = decode.products * max(read / rates.bandwidth, computing)
            cache = decode.cache * running * self._kv(self.prompt + self.response / 2) / rates.bandwidth
            calls = decode.step_s + shape.num_layers * decode.layer_s
            return (kernels + cache) / gpus + calls + running * (decode.sequence_s + shape.vocabulary * decode.logit_s)

        block = KV_BLOCK_TOKENS[place.device]  # what is left of a prompt is computed for each of its responses
        again = min(self.prompt, block / (1 if self.prompt <= block else 2))
        tokens = self.prompts * (self.prompt - again) + self.sequences * again
        attention = 2.0 * shape.num_layers * shape.query_width * self.prompt * tokens
        prefill = 2.0 * self.layers * tokens
        per_gpu = place.num_engines * gpus
        first = rates.forward.seconds(shape.hidden, shape.num_layers, 1, 0, prefill / per_gpu, attention / per_gpu)
        longest = (self.config.data.max_response_length - self.response) * step(1.0)
        return first + sequences * self.response / at_once * step(at_once) + longest

    def log_probs(self, place: Placement, role: str, micro_batch: int, rates: Rates) -> float:
        """Seconds of a forward pass over all sequences, with one all-gather of the weights per micro-batch."""
        ranks, split = place.world_sizes[role], self.config.sequence_parallel_size(role)
        limit = self.config.actor_rollout_ref.actor.max_token_len
        passes = self._passes(self.sequences / place.row_groups(self.config, role), micro_batch, limit)
        computed = self._pass(rates.forward, ranks, passes) + self._heads_exchanged(passes, ranks, split, rates, 1)
        return self._with_exchange(computed, passes, ranks, rates, self.bytes, 1)

    def update(self, place: Placement, rates: Rates) -> float:
        """Seconds of the policy's optimizer steps."""
        roles, actor = self.config.actor_rollout_ref, self.config.actor_rollout_ref.actor
        training = _Training(
            place.actor_world_size,
            actor.ulysses_sequence_parallel_size,
            actor.fsdp_config,
            actor.ppo_mini_batch_size,
            actor.ppo_micro_batch_size_per_gpu,
            actor.max_token_len,
            actor.ppo_epochs,
            recomputes=roles.model.enable_gradient_checkpointing,
            trained=self.shape.lora_parameters(roles.model) if roles.model.lora_rank else None,
        )
        return self.training(training, rates)

    def training(self, training: _Training, rates: Rates) -> float:
        """Seconds of the optimizer steps of a training step.

        Forward and backward: no weight gradients with LoRA, one more forward pass with checkpointing.
        """
        ranks, all_weights = training.ranks, training.trained is None
        trained = self.shape.num_parameters if training.trained is None else training.trained
        shards = training.fsdp.num_shards(ranks)
        steps = self.config.data.train_batch_size // training.mini_batch
        of_group = self.sequences / steps / max(1, ranks // training.split)
        passes = steps * self._passes(of_group, training.micro_batch, training.max_token_len)
        share = (2 + all_weights + training.recomputes) / 3
        computed = share * self._pass(rates.update, ranks, passes, times=3)
        computed += self._heads_exchanged(passes, ranks, training.split, rates, 2 + training.recomputes)
        gradients = 4.0 * trained * all_weights  # reduced in float32
        size = 2 * self.bytes + gradients
        both = self._with_exchange(computed, passes, shards, rates, size, 2 + all_weights)
        return training.epochs * (both + steps * OPTIMIZER_BYTES * trained / shards / rates.bandwidth)

    def weight_sync(self, place: Placement, rates: Rates) -> float:
        """Seconds to send all weights once."""
        engine = self.config.actor_rollout_ref.rollout.checkpoint_engine
        backend = engine.resolved_backend(place.device, shares_gpu=place.shares_gpu)
        return rates.sync_s + self.bytes / rates.sync.get(backend, min(rates.sync.values()))

    def _pass(self, rates: PassRates, ranks: int, passes: int, times: int = 1) -> float:
        work = (times * each / ranks for each in (self.products, self.attention))
        return rates.seconds(self.shape.hidden, self.shape.num_layers, passes, self.sequences / ranks, *work)

    def _passes(self, sequences: float, micro_batch: int, limit: int | None) -> int:
        per_pass = micro_batch if limit is None else max(1.0, limit / (self.tokens / self.sequences))
        return ceil(sequences / per_pass)

    def _heads_exchanged(self, passes: int, ranks: int, split: int, rates: Rates, times: int) -> float:
        """Seconds in which ranks that split sequences exchange tokens and heads around attention, `times` in a pass:
        queries, keys and values, and what comes back, each by itself.
        """
        if split == 1:
            return 0.0
        shape = self.shape
        values = 2.0 * (shape.query_width + shape.key_width) * shape.num_layers
        size = values * self.tokens / ranks * self.number * (split - 1) / split
        return times * (size / rates.exchange + passes * 4 * shape.num_layers * rates.exchange_s)

    def _with_exchange(self, computed: float, passes: int, ranks: int, rates: Rates, size: float, times: int) -> float:
        """Seconds of passes with `times` exchanges of a unit each, `size` bytes together; GPUs compute meanwhile."""
        if ranks == 1:
            return computed
        on_cpu = self.config.device == "cpu"
        far = not on_cpu and ranks > self.config.trainer.n_gpus_per_node
        each = size * (ranks - 1) / ranks / (NETWORK if far else rates.exchange)
        exchanged = passes * (each + times * (self.shape.num_layers + 1) * rates.exchange_s)
        return computed + exchanged if on_cpu else max(computed, exchanged)
