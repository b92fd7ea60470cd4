"""Estimates the memory of each process by one formula, from the model's sizes and the settings of its row in the table.

The estimate is for the largest passes that the settings allow, with every sequence at its maximum length.
tests/plan/test_memory.py compares it with torch's memory tracker. What weights, gradients and states alone exceed is
refused; what the whole estimate exceeds is noted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Any

from grpo_dist.assets.model_folder import overridden
from grpo_dist.config.keys import Problem, value_of
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.config.schema_roles import ULYSSES, Device
from grpo_dist.engines.base import rollout_backend
from grpo_dist.plan import roles as table
from grpo_dist.plan.model_shape import ModelShape, model_config_at_hand, model_shape
from grpo_dist.plan.placement import placement
from grpo_dist.plan.roles import Model, Pass, Role, engine_dtype, lora_of, models_of, roles_of, weight_transport
from grpo_dist.sizes import ADAM_STATES, CHUNK_LOGITS, CPU_KV_CACHE_GIB, GIB, STATE_BYTES

# GiB of GPU memory per process besides its tensors: CUDA context and kernels (1.36 on H100 and H200); NCCL's buffers,
# where it has other ranks; an engine's CUDA graphs. The last two are not measured.
CUDA_GIB, NCCL_GIB, GRAPHS_GIB = 1.5, 0.5, 1.0
# Bytes that pinned copies of a sleeping engine's weights take, per byte: blocks of a power of two.
PINNED = 1.4
# GiB of CPU memory per process besides its tensors: Python and its libraries, on GPU machines also CUDA.
PROCESS_GIB = {"cpu": 0.5, "cuda": 3.0}
# Bytes of a number, by the name of its type.
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "float32": 4, "bfloat16": 2, "float16": 2}

# Shares of what a layer keeps for its backward pass: all of it where it is recomputed, and half as much of gradients on
# their way; these alone where it is not recomputed; and half of it in a pass that trains nothing.
_RECOMPUTED, _GRADIENTS, _FORWARD = 1.5, 0.5, 0.5

Parts = dict[str, float]


@dataclass(frozen=True)
class RoleMemory:
    """Memory of one process of a role, in GiB.

    Args:
        parts: peak memory on the device, by purpose.
        states: what no smaller pass makes smaller: weights, gradients and optimizer states.
        beside: peak memory in passes that come while engines sample, where these sleep during all others; {}: none do.
        waiting: what stays on the device while other roles compute.
        context: what the process has on a GPU besides its tensors.
        syncing: what is on the device while weights go, tensor by tensor, from the actor to an engine that slept, and
            has no cache yet; 0 for an engine that gets them when the actor has sent all (through the object store).
        host: CPU memory, by purpose; without GPUs this comes on top of `parts`.
        saved: what all processes of the role together write into a checkpoint.
        share: of a GPU, which an engine takes when it starts; 0: it takes what it needs.
        sleeps: whether an engine gives its share back while another role computes.
    """

    role: str
    parts: Mapping[str, float]
    states: Mapping[str, float] = field(default_factory=dict)
    beside: Mapping[str, float] = field(default_factory=dict)
    waiting: float = 0.0
    context: float = 0.0
    syncing: float = 0.0
    host: Mapping[str, float] = field(default_factory=dict)
    saved: float = 0.0
    share: float = 0.0
    sleeps: bool = False


# --- the formula ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rank:
    """One rank of a sharded model. Sizes are in bytes.

    Args:
        held: of a stored weight that trains, and of each of a model that does not.
        compute: of a number in forward and backward passes.
        head: of a weight of the output layer, held and in passes; 0: those of the others.
        shards: ranks that hold one copy of the weights together.
        reshards: whether gathered weights are freed after each layer.
        trained: number of parameters that are trained: all, or LoRA's; 0: the role has no optimizer.
        state: of one of the optimizer's two states of a weight.
        defers: whether gradients stay whole until the last pass of a mini-batch.
        offloads: whether the optimizer's states are on the device only during its step.
        recomputes: whether layers keep only their inputs for the backward pass.
        saves_on_cpu: whether these wait in CPU memory.
    """

    shape: ModelShape
    device: Device
    held: int
    compute: int
    head: int = 0
    shards: int = 1
    reshards: bool = True
    trained: int = 0
    state: float = STATE_BYTES["AdamW"]
    defers: bool = False
    offloads: bool = False
    recomputes: bool = False
    saves_on_cpu: bool = False

    @property
    def trains_all(self) -> bool:
        """Whether all weights are trained."""
        return self.trained == self.shape.num_parameters

    @property
    def weights(self) -> float:
        """The rank's shard of the weights, which beside LoRA's factors are held in the type of passes."""
        base = self.held if not self.trained or self.trains_all else self.compute
        of_factors = 0 if not self.trained or self.trains_all else self.trained * self.held
        vision = self.shape.vision * self.compute  # whole on each
        return vision + (self.shape.num_parameters * base + self.head_beyond(base) + of_factors) / self.shards

    def head_beyond(self, size: int) -> float:
        """What the output layer takes beyond weights of that size."""
        return float(self.shape.output_layer * max(self.head - size, 0))

    @property
    def step(self) -> Parts:
        """What an optimizer step needs: AdamW's states are on the device."""
        trained = self.trained / self.shards
        optimizer = ADAM_STATES * self.state * trained
        return {"weights": self.weights, "gradients": self.held * trained, "optimizer": optimizer}

    @property
    def kept(self) -> Parts:
        """What a pass of an update finds on the device; gradients that are not reduced are whole, in float32."""
        whole = {"gradients": 4.0 * self.trained} if self.defers or self.shards == 1 else {}
        return self.step | whole | ({"optimizer": 0.0} if self.offloads else {})

    @property
    def gathered(self) -> float:
        """Gathered weights: embedding, output layer and two layers, or all of them where they stay.

        A rank with all weights has a copy of what it trains, and of what it holds in another type than its passes'.
        """
        if self.shards > 1:
            resharded = self.shape.root + 2.0 * self.shape.layer
            weights = resharded if self.reshards else self.shape.num_parameters
            return weights * self.compute + self.head_beyond(self.compute)
        frozen = self.shape.num_parameters * (self.held != self.compute)
        whole = not self.trained or self.trains_all
        copies = self.trained or frozen
        return copies * self.compute + (self.head_beyond(self.compute) if copies and whole else 0.0)

    def inputs(self, tokens: int) -> float:
        """Hidden states, which are the inputs of a layer."""
        return float(tokens * self.shape.hidden * self.compute)

    def layer(self, tokens: int) -> float:
        """What a layer keeps for its backward pass: outputs of norms, inputs of matrices and of attention."""
        shape = self.shape
        attention = max(5 * self.compute * (shape.query_width + shape.key_width), 4 * shape.recurrent)
        return float(tokens * (attention + self.compute * (8 * shape.hidden + 4 * shape.width + 2 * shape.copies)))

    def logits(self, tokens: int) -> float:
        """A chunk of logits and its softmax, in float32, and hidden states that become float32 for an output layer."""
        rows = max(1, CHUNK_LOGITS[self.device] // self.shape.vocabulary) if self.shape.output_layer else 0
        states = self.shape.hidden if self.head > self.compute else 0
        return 2 * 4.0 * min(rows, tokens) * (self.shape.vocabulary + states)

    def saved_on_cpu(self, tokens: int) -> float:
        """Activations that wait in CPU memory; a pinned block's size is a power of two."""
        return self.shape.num_layers * 2.0 ** ceil(log2(self.inputs(tokens))) if self.saves_on_cpu else 0.0

    def update(self, tokens: int) -> Parts:
        """The peak of a mini-batch: backwards through a layer or the output layer (gradients: float32), or the step."""
        shape, kept, gradients = self.shape, self.layer(tokens), 4.0 * self.trains_all
        saved = self.inputs(tokens) if self.recomputes else kept
        activations = saved * (1 if self.saves_on_cpu else shape.num_layers)
        layer = (_RECOMPUTED if self.recomputes else _GRADIENTS) * kept + gradients * shape.layer
        head = self.logits(tokens) + gradients * shape.output_layer
        parts = {"gathered weights": self.gathered, "activations": activations, "layer or logits": max(layer, head)}
        return largest(self.kept | parts, self.step)

    def forward(self, tokens: int) -> Parts:
        """The peak of a pass that trains nothing."""
        activations = max(_FORWARD * self.layer(tokens), self.inputs(tokens) + self.logits(tokens))
        return self.kept | {"gradients": 0.0, "gathered weights": self.gathered, "activations": activations}


def largest(*moments: Parts) -> Parts:
    """Return the moment whose parts are the most."""
    return max(moments, key=lambda parts: sum(parts.values()))


# --- roles ---------------------------------------------------------------------------------------------------------
def memory_estimate(
    config: JobConfig, model_config: Mapping[str, Any] | None, num_parameters: int = 0
) -> list[RoleMemory] | None:
    """Return the memory of one process of each role; None if the sizes of the trained model are unknown.

    Other models are left out if their config.json is not on this machine.

    Args:
        model_config: config.json of the model that is trained.
        num_parameters: parameters in its weight files; 0: unknown, so they are computed from config.json.
    """
    first, roles = models_of(config)[0], []
    policy = _shape(first, model_config, num_parameters)
    if policy is None:
        return None
    if not isinstance(config, RunConfig) or config.data.image_key is None:
        policy = replace(policy, vision=0)
    for row in roles_of(config):
        model = row.model(config)
        if row.name == "rollout":
            assert isinstance(config, RunConfig)
            roles.append(_engine(config, policy))
        elif model is not None:
            shape = policy if model.key == first.key else _shape(model, model_config_at_hand(model.path))
            roles += [] if shape is None else [_role(config, row, model, shape)]
    return roles


def _shape(model: Model, model_config: Mapping[str, Any] | None, num_parameters: int = 0) -> ModelShape | None:
    """Return the sizes of a model; one with a head of its own has no output layer to speak of."""
    if model_config is None:
        return None
    shape = model_shape(overridden(model_config, model.override_config or {}), num_parameters)
    if shape is None or not model.outputs:
        return shape
    return replace(shape, tied=True, output_layer=0, counted=0)  # its files were counted with what they have


def _role(config: JobConfig, row: Role, model: Model, shape: ModelShape) -> RoleMemory:
    passes = [limits for limits in (*row.passes(config), *row.own_passes(config)) if not limits.none]
    update = next((limits for limits in passes if limits.updates and not config.trainer.val_only), None)
    layers = None if update is None else value_of(config, update.updates)
    fsdp = value_of(config, row.fsdp)
    optim = value_of(config, key) if (key := table.optimizer_key(config, row)) else None
    ranks, lora = placement(config).world_sizes[row.name], lora_of(config, model)
    sends = row.name == roles_of(config)[0].name
    factors = 0 if lora is None else shape.lora_parameters(lora)
    rank = Rank(
        shape,
        config.device,
        held=DTYPE_BYTES[model.compute if factors and update is None else model.held],
        compute=DTYPE_BYTES[model.compute],
        head=DTYPE_BYTES[model.head] if model.head else 0,
        shards=fsdp.num_shards(ranks),
        reshards=table.reshards(config, row),
        trained=0 if update is None else factors or shape.num_parameters,
        state=STATE_BYTES[getattr(optim, "optimizer", "AdamW")],
        defers=fsdp.defer_grad_sync,
        offloads=table.offloads_optimizer(config, row),
        recomputes=layers is not None and layers.enable_gradient_checkpointing,
        saves_on_cpu=layers is not None and layers.enable_activation_offload and config.device == "cuda",
    )
    peaks = [rank.forward(_tokens(config, row, limits)) for limits in passes if not limits.updates]
    scores = peaks if row.name == "reward_model" and row.name in placement(config).in_turns else []
    peaks = [*peaks] if update is None else [*peaks, rank.update(_tokens(config, row, update))]
    states, optimizer = rank.weights + rank.step["optimizer"], rank.kept["optimizer"]
    stays = shape.vision * rank.compute  # not offloaded
    waiting = stays + (rank.weights - stays) * (not fsdp.param_offload) + optimizer
    written = rank.weights - stays + rank.step["optimizer"] * STATE_BYTES["AdamW"] / rank.state
    largest_tensor = 2 * shape.vocabulary * shape.hidden * max(rank.compute, rank.head)  # cast, and gathered
    host = {
        "process": PROCESS_GIB[config.device] * GIB,
        "offloaded": (states - waiting) * (config.device == "cuda"),
        "activations": 0.0 if update is None else rank.saved_on_cpu(_tokens(config, row, update)),
        "a copy for a checkpoint": 0.0 if update is None else written,
    }
    return RoleMemory(
        row.name,
        _gib(largest(rank.kept, *peaks)),
        _gib(largest(rank.kept, rank.step)),
        beside=_gib(largest(*scores)) if scores else {},
        waiting=waiting / GIB,
        context=CUDA_GIB + NCCL_GIB * (ranks > 1),
        syncing=(waiting + largest_tensor * sends) / GIB,
        host=_gib(host),
        saved=0.0 if update is None else written * rank.shards / GIB,
    )


def _tokens(config: JobConfig, row: Role, limits: Pass) -> int:
    """Return the tokens on a rank of the largest pass, of which each rank of a group that splits it has its share."""
    if isinstance(config, SupervisedConfig):
        return limits.max_token_len or limits.size * config.data.max_length
    assert isinstance(config, RunConfig)
    roles = config.actor_rollout_ref  # whose responses of a group may be one sequence behind their prompt
    in_a_group = roles.rollout.n if roles.model.use_remove_padding and roles.actor.use_prefix_grouper else 1
    prompts = -(-limits.size // in_a_group)
    tokens = prompts * config.data.max_prompt_length + limits.size * config.data.max_response_length
    return -(-(limits.max_token_len or tokens) // config.sequence_parallel_size(row.name))


# --- engines -------------------------------------------------------------------------------------------------------
def _engine(config: RunConfig, shape: ModelShape) -> RoleMemory:
    rollout, place = config.actor_rollout_ref.rollout, placement(config)
    size, cache = DTYPE_BYTES[engine_dtype(config)], _kv_cache_gib(config)
    head = 4 if config.actor_rollout_ref.model.head_dtype else size
    parameters = shape.num_parameters + shape.vision
    weights = (parameters * size + shape.output_layer * (head - size)) / place.tensor_parallel
    states = {"weights": weights, "KV cache": (cache or 0.0) * GIB}
    parts = {} if cache else {"KV cache of one sequence": config.max_model_len * _kv_bytes(config, shape)}
    if config.device == "cuda":
        whole = 0 if rollout.enable_chunked_prefill else config.max_model_len  # a pass then holds the longest sequence
        tokens, sampled = max(rollout.max_num_batched_tokens, whole), rollout.max_num_seqs * shape.vocabulary
        per_token = (4 * shape.hidden + 3 * shape.width / place.tensor_parallel + shape.copies) * size
        parts["pass"] = tokens * per_token + 3 * 4.0 * sampled
    host = {"process": PROCESS_GIB[config.device] * GIB}
    by_ray = weight_transport(config, shares_gpu=place.shares_gpu) == "object_store"
    if by_ray:  # in each machine's object store and, for an engine of several processes, in a file
        has_file = config.device == "cuda" or place.tensor_parallel > 1
        host["weights on their way"] = weights * (has_file + config.trainer.nnodes / place.num_engines)
    sleeps = place.engines_sleep
    if sleeps and rollout_backend(rollout.name).keeps_sleeping_weights(rollout, config.actor_rollout_ref.model):
        host["weights while it sleeps"] = PINNED * weights
    meets = sleeps and not by_ray
    graphs = rollout_backend(rollout.name).keeps_graphs(rollout)
    return RoleMemory(
        "rollout",
        _gib(states | parts),
        _gib(states),
        waiting=0.0 if sleeps else sum((states | parts).values()) / GIB,
        context=CUDA_GIB + NCCL_GIB * (place.tensor_parallel > 1) + GRAPHS_GIB * graphs,
        syncing=(weights + 2.0 * rollout.checkpoint_engine.bucket_bytes) / GIB * meets,
        host=_gib(host),
        share=0.0 if cache else rollout.gpu_memory_utilization,
        sleeps=sleeps,
    )


def kv_cache_tokens(config: RunConfig, model_config: Mapping[str, Any] | None) -> int | None:
    """Return the tokens that fit in the KV cache of one engine; None if vLLM decides its size when it starts."""
    shape = None if model_config is None else model_shape(model_config)
    gib = _kv_cache_gib(config)
    return None if shape is None or gib is None else int(gib * GIB / _kv_bytes(config, shape))


def _kv_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Return the bytes of KV cache that one token takes on one GPU of an engine."""
    size = DTYPE_BYTES[engine_dtype(config)]
    return 2 * shape.num_layers * shape.key_width * size / placement(config).tensor_parallel


def _kv_cache_gib(config: RunConfig) -> float | None:
    asked = config.actor_rollout_ref.rollout.kv_cache_memory_gib
    return CPU_KV_CACHE_GIB if asked is None and config.device == "cpu" else asked


def _gib(parts: Mapping[str, float]) -> Parts:
    """Return bytes as GiB, without the parts that take nothing."""
    return {name: size / GIB for name, size in parts.items() if size}


# --- what fits -----------------------------------------------------------------------------------------------------
# What makes room, those that cost least first.
_MORE = ("trainer.n_gpus_per_node", "trainer.nnodes", "a smaller model")
_REMEDIES = (
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
    "actor_rollout_ref.model.enable_activation_offload=true",
    f"actor_rollout_ref.actor.{ULYSSES}",
    "fsdp_config.param_offload=true of a role that waits",
    "actor_rollout_ref.actor.fsdp_config.defer_grad_sync=false",
    "actor_rollout_ref.rollout.free_cache_engine=true",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=null",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.model.lora_rank=32",
    "cluster.*_world_size",
    *_MORE,
)
_SUPERVISED_REMEDIES = (
    "model.enable_gradient_checkpointing=true",
    "data.micro_batch_size_per_gpu or data.max_token_len_per_gpu",
    "engine.optimizer_offload=true",
    "engine.defer_grad_sync=false",
    "model.lora_rank=32 (sft)",
    *_MORE,
)


def memory_problems(
    config: JobConfig,
    model_config: Mapping[str, Any] | None,
    gib: float | None,
    host_gib: float | None,
    num_parameters: int = 0,
    *,
    certain: bool = True,
) -> Iterator[Problem]:
    """Report processes that need more memory than there is.

    Args:
        model_config: config.json of the model that is trained; None: unknown, so nothing is checked.
        gib: memory of one GPU, GiB; None: unknown.
        host_gib: CPU memory of the machine that runs all processes, GiB; None: unknown.
        num_parameters: see `memory_estimate`.
        certain: whether only weights, gradients, optimizer states and what engines take count, without which a run
            cannot be; false: the whole estimate, of which a note is made.
    """
    roles, model = memory_estimate(config, model_config, num_parameters) or [], models_of(config)[0]
    if certain:
        roles = [replace(role, parts=role.states, beside={}, context=0.0, syncing=0.0, host={}) for role in roles]
    remedies = _SUPERVISED_REMEDIES if isinstance(config, SupervisedConfig) else _REMEDIES
    for what, parts, limit, has in _limits(config, roles, gib, host_gib):
        if (total := sum(parts.values())) > limit:
            listed = " + ".join(f"{name} {size:.3g}" for name, size in parts.items() if size)
            text = f"{'' if certain else 'by the estimate '}{what} {listed} = {total:.3g} GiB, and {has}"
            advice = f"what makes room, in this order: {', '.join(remedies)}"
            keys = (model.key, *_MORE[:2], "cluster.gpu_memory_gib")
            yield Problem(f"{model.setting}: {text}; {advice}", keys)


def _limits(
    config: JobConfig, roles: list[RoleMemory], gib: float | None, host_gib: float | None
) -> Iterator[tuple[str, Mapping[str, float], float, str]]:
    """Yield (what holds them, GiB by purpose, most GiB, what has these) of a GPU, and of the CPU memory of a machine.

    On a GPU it is the worst moment of roles that share it, or of a role alone. Without GPUs tensors are in CPU memory.
    """
    if gib is not None and config.device == "cuda":
        asked = config.cluster.gpu_memory_gib
        has = f"a GPU of this machine has {gib:.3g} GiB" if asked is None else f"cluster.gpu_memory_gib={asked:g}"
        for names, worst in worst_moments(config, roles, gib):
            yield f"a GPU with {names} holds", worst, gib, has
        for role in (role for role in roles if role.share):
            share = f"gpu_memory_utilization={role.share:g} of {has} is {role.share * gib:.3g} GiB"
            yield f"a {role.role} process needs", role.parts, role.share * gib, f"actor_rollout_ref.rollout.{share}"
    if host_gib is not None:
        counts, needed = placement(config).world_sizes, {}
        for role in roles:
            size = sum(role.host.values()) + (sum(role.parts.values()) if config.device == "cpu" else 0.0)
            needed[f"{counts[role.role]} {role.role}"] = size * counts[role.role] / config.trainer.nnodes
        yield "the processes of a machine hold", needed, host_gib, f"it has {host_gib:.3g} GiB of CPU memory"


def worst_moments(config: JobConfig, roles: list[RoleMemory], gib: float) -> Iterator[tuple[str, Parts]]:
    """Yield what a GPU holds when it holds most, in GiB by purpose, for roles that share one and for each role alone.

    Args:
        gib: memory of one GPU, GiB, of which an engine takes its share.
    """
    sharing = placement(config).sharing
    groups = [[role for role in roles if role.role in sharing], *([role] for role in roles if role.role not in sharing)]
    for group in filter(None, groups):
        moments = [_moment(role, role.parts, group, gib) for role in group]
        moments += [_moment(role, role.beside, group, gib, engines_sleep=False) for role in group if role.beside]
        if any(role.sleeps and role.syncing for role in group):
            moments.append({f"{role.role} in a sync": role.syncing + role.context for role in group})
        yield " and ".join(role.role for role in group), largest(*moments)


def _moment(
    active: RoleMemory,
    computes: Mapping[str, float],
    group: list[RoleMemory],
    gib: float,
    *,
    engines_sleep: bool = True,
) -> Parts:
    """Return the GiB of a GPU that roles have which share it, while one of them computes and the others wait.

    An engine that is awake has its share, of which CUDA's is a part, or what it needs.
    """
    parts: Parts = {}
    for role in group:
        awake = role is active or not (role.sleeps and engines_sleep)
        if role.share and awake:
            parts[role.role] = role.share * gib
        elif role is active:
            parts |= {f"{role.role}'s {name}": size for name, size in (*computes.items(), ("CUDA", role.context))}
        elif role.sleeps and awake:
            parts[role.role] = sum(role.parts.values()) + role.context
        else:
            parts[role.role] = role.waiting + role.context
    return parts


def memory_notes(config: JobConfig) -> Iterator[Problem]:
    """Note what by the estimate does not fit, where no checks follow: these note it of the machine that they find."""
    if config.trainer.dry_run == "config":
        model, gib = model_config_at_hand(config.model_path), config.cluster.gpu_memory_gib
        yield from memory_problems(config, model, gib, None, certain=False)
        if gib is None and config.device == "cuda":
            key = "cluster.gpu_memory_gib"
            yield Problem(f"{key}=null: whether the run fits is not known; set it (a GPU of 80 GB: {key}=79.1)", (key,))
