"""Checks the memory estimate against GPUs and machines: what cannot fit is refused, what may not fit is noted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_dist.config.keys import flatten
from grpo_dist.config.problems import Problem, shown
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.plan.memory import CUDA_GIB, GRAPHS_GIB, NCCL_GIB, RoleMemory, largest, memory_estimate
from grpo_dist.plan.model_shape import model_config_at_hand
from grpo_dist.plan.placement import placement
from grpo_dist.plan.role_models import weight_transport
from grpo_dist.plan.roles import models_of

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# What makes room, those that cost least first. The first lists are of what passes need, the others help in any case.
_GPUS = ("trainer.n_gpus_per_node", "trainer.nnodes", "a smaller model")
_PASSES = (
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_ACTOR}.ppo_max_token_len_per_gpu",
    f"{_ACTOR}.fsdp_config.optimizer_offload=true",
    "actor_rollout_ref.model.enable_activation_offload=true",
    f"{_ACTOR}.ulysses_sequence_parallel_size",
)
_STATES = (
    "fsdp_config.param_offload=true of a role that waits",
    f"{_ACTOR}.fsdp_config.defer_grad_sync=false",
    f"{_ROLLOUT}.free_cache_engine=true",
    f"{_ROLLOUT}.checkpoint_engine.backend=object_store",
    f"{_ROLLOUT}.gpu_memory_utilization",
    f"{_ROLLOUT}.tensor_model_parallel_size",
    "actor_rollout_ref.model.lora_rank=32",
    "cluster.*_world_size",
    *_GPUS,
)
_SUPERVISED_PASSES = (
    "model.enable_gradient_checkpointing=true",
    "data.micro_batch_size_per_gpu",
    "data.max_token_len_per_gpu",
    "engine.optimizer_offload=true",
)
_SUPERVISED_STATES = ("engine.defer_grad_sync=false", "model.lora_rank=32 (sft)", *_GPUS)


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
    supervised = isinstance(config, SupervisedConfig)
    ways = _SUPERVISED_STATES if supervised else _STATES
    if not certain:
        ways = (*(_SUPERVISED_PASSES if supervised else _PASSES), *ways)
    texts = [] if gib is None or config.device == "cpu" else [*_on_gpus(config, roles, gib, certain=certain)]
    if host_gib is not None and (config.device == "cpu" or not certain):
        texts += _in_machines(config, roles, host_gib, certain=certain)
    for text in texts:
        helpful = [way for way in _not_yet_set(config, ways) if "rollout" in text or not way.startswith(_ROLLOUT)]
        advice = f"what makes room, in this order: {', '.join(helpful)}"
        estimate = "" if certain else "by the estimate "
        yield Problem(f"{model.setting}: {estimate}{text}; {advice}", (model.key, *_GPUS[:2], "cluster.gpu_memory_gib"))


def _not_yet_set(config: JobConfig, ways: tuple[str, ...]) -> Iterator[str]:
    """Yield the keys that may still be set: not those that have the value, or whose limit the passes do not use."""
    settings = dict(flatten(config.model_dump(mode="json")))
    by_tokens = settings.get(f"{_ACTOR}.use_dynamic_bsz")
    unused = f"{_ACTOR}.{'ppo_micro_batch_size_per_gpu' if by_tokens else 'ppo_max_token_len_per_gpu'}"
    for way in ways:
        key, _, value = way.partition("=")
        if way != unused and (not value or shown(settings.get(key)) != value):
            yield way


def memory_notes(config: JobConfig) -> Iterator[Problem]:
    """Note what by the estimate does not fit, where no checks follow: these note it of the machine that they find."""
    if config.trainer.dry_run == "config":
        model, gib = model_config_at_hand(config.model_path), config.cluster.gpu_memory_gib
        yield from memory_problems(config, model, gib, None, certain=False)
        if gib is None and config.device == "cuda":
            key = "cluster.gpu_memory_gib"
            yield Problem(f"{key}=null: whether the run fits is not known; set it (a GPU of 80 GB: {key}=79.1)", (key,))


def _on_gpus(config: JobConfig, roles: list[RoleMemory], gib: float, *, certain: bool) -> Iterator[str]:
    """Yield what is more than a GPU has: at the worst moment of roles that share one, or of a role alone."""
    asked = config.cluster.gpu_memory_gib
    has = f"a GPU of this machine has {gib:.3g} GiB" if asked is None else f"cluster.gpu_memory_gib={asked:g}"
    for names, worst in worst_moments(config, roles, gib, certain=certain):
        yield from _over(f"a GPU with {names} holds", worst, gib, has)
    for role in roles:
        if role.share:
            of = f"{_ROLLOUT}.gpu_memory_utilization={role.share:g} of {has} is {role.share * gib:.3g} GiB"
            yield from _over(
                f"a {role.role} process needs", role.states if certain else role.parts, role.share * gib, of
            )


def worst_moments(
    config: JobConfig, roles: list[RoleMemory], gib: float, *, certain: bool = False
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield what a GPU holds when it holds most, in GiB by purpose, for roles that share one and for each role alone.

    Args:
        gib: memory of one GPU, GiB, of which an engine takes its share.
        certain: see `memory_problems`.
    """
    sharing = placement(config).sharing
    groups = [[role for role in roles if role.role in sharing], *([role] for role in roles if role.role not in sharing)]
    for group in filter(None, groups):
        moments = [_moment(config, role, group, gib, certain=certain) for role in group]
        worst = largest(*moments, *([] if certain else [_sync(config, group)]))
        yield " and ".join(role.role for role in group), worst


def _moment(
    config: JobConfig, active: RoleMemory, group: list[RoleMemory], gib: float, *, certain: bool
) -> dict[str, float]:
    """Return the GiB of a GPU that roles have which share it, while one of them computes and the others wait.

    An engine has its share all the time, of which CUDA's is a part, unless it sleeps while a role trains.
    """
    parts = {}
    for role in group:
        own, context = (role.states, 0.0) if certain else (role.parts, _context(config, role))
        if role.share and not (_sleeps(config) and "optimizer" in active.states):
            parts[role.role] = role.share * gib
        elif role is active and not role.share:
            parts |= {f"{role.role}'s {name}": size for name, size in (*own.items(), ("CUDA", context))}
        else:
            parts[role.role] = role.waiting + context
    return parts


def _sync(config: JobConfig, group: list[RoleMemory]) -> dict[str, float]:
    """Return the GiB of a GPU while weights go from the actor to an engine that slept, and has no cache yet.

    Through the object store they are never there twice: the actor leaves the GPU, if it does, before they come.
    """
    ends = {"actor", "rollout"}
    if not isinstance(config, RunConfig) or not _sleeps(config) or not ends <= {role.role for role in group}:
        return {}
    if weight_transport(config, shares_gpu=True) == "object_store":
        return {}
    return {
        f"{role.role} in a sync": (role.sending if role.role in ends else role.waiting) + _context(config, role)
        for role in group
    }


def _sleeps(config: JobConfig) -> bool:
    return isinstance(config, RunConfig) and config.actor_rollout_ref.rollout.free_cache_engine


def _context(config: JobConfig, role: RoleMemory) -> float:
    """Return the GiB of a GPU that a process has besides its tensors."""
    place = placement(config)
    if role.role != "rollout":
        return CUDA_GIB + NCCL_GIB * (place.world_sizes[role.role] > 1)
    assert isinstance(config, RunConfig)
    rollout = config.actor_rollout_ref.rollout
    away = rollout.enforce_eager or rollout.engine_kwargs.vllm.get("sleep_mode_offload_cudagraph", False)
    return CUDA_GIB + NCCL_GIB * (place.tensor_parallel > 1) + GRAPHS_GIB * (not away)


def _in_machines(config: JobConfig, roles: list[RoleMemory], gib: float, *, certain: bool) -> Iterator[str]:
    """Yield that the processes of a machine need more CPU memory than it has; without GPUs tensors are in it too."""
    counts, needed = placement(config).world_sizes, {}
    for role in roles:
        size = sum((role.states if certain else role.parts).values()) if config.device == "cpu" else 0.0
        size += 0.0 if certain else sum(role.host.values())
        needed[f"{counts[role.role]} {role.role}"] = size * counts[role.role] / config.trainer.nnodes
    yield from _over("the processes of a machine hold", needed, gib, f"it has {gib:.3g} GiB of CPU memory")


def _over(what: str, parts: Mapping[str, float], limit: float, has: str) -> Iterator[str]:
    if sum(parts.values()) > limit:
        listed = " + ".join(f"{name} {size:.3g}" for name, size in parts.items() if size)
        yield f"{what} {listed} = {sum(parts.values()):.3g} GiB, and {has}"
