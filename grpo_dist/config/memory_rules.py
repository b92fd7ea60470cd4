"""Checks the memory estimate against the GPUs and machines, and finds settings with which the run would fit.

A remedy is verified before it is suggested: the estimate is computed again with the setting changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from grpo_dist.config.memory import RoleMemory
from grpo_dist.config.memory_remedies import fitting_settings
from grpo_dist.config.placement import FOLLOWERS, TRAINED, placement
from grpo_dist.config.placement_rules import PLACEMENT_RULES
from grpo_dist.config.problems import Problem, value_of
from grpo_dist.config.rank_memory import CUDA_GIB
from grpo_dist.config.schema import RunConfig

Estimate = Callable[[RunConfig], list[RoleMemory] | None]
Misfit = tuple[str, float]  # what needs more than there is, and how much more, in GiB

_MODEL, _ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
_ROLLOUT, _REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_CRITIC = "critic.model"
_KEYS = (f"{_MODEL}.path", "trainer.n_gpus_per_node", "cluster.gpu_memory_gib")
# Tried in this order: cheapest first.
_REMEDIES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    (f"{_ACTOR}.fsdp_config.defer_grad_sync", (False,)),
    (f"{_ACTOR}.fsdp_config.reshard_after_forward", (True,)),
    (f"{_REF}.fsdp_config.param_offload", (True,)),
    ("reward_model.model.fsdp_config.param_offload", (True,)),
    ("reward_model.micro_batch_size_per_gpu", (8, 4, 2, 1)),
    ("reward_model.retrain.enable_gradient_checkpointing", (True,)),
    ("reward_model.retrain.micro_batch_size_per_gpu", (8, 4, 2, 1)),
    ("reward_model.retrain.optimizer_offload", (True,)),
    (f"{_CRITIC}.fsdp_config.defer_grad_sync", (False,)),
    (f"{_CRITIC}.fsdp_config.reshard_after_forward", (True,)),
    (f"{_CRITIC}.fsdp_config.param_offload", (True,)),
    (f"{_CRITIC}.fsdp_config.optimizer_offload", (True,)),
    ("critic.forward_micro_batch_size_per_gpu", (8, 4, 2, 1)),
    (f"{_CRITIC}.enable_gradient_checkpointing", (True,)),
    ("critic.ppo_micro_batch_size_per_gpu", (16, 8, 4, 2, 1)),
    ("critic.ppo_max_token_len_per_gpu", (65536, 32768, 16384, 8192, 4096, 2048, 1024)),
    (f"{_REF}.log_prob_micro_batch_size_per_gpu", (8, 4, 2, 1)),
    (f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", (8, 4, 2, 1)),
    (f"{_MODEL}.enable_gradient_checkpointing", (True,)),
    (f"{_ACTOR}.ppo_micro_batch_size_per_gpu", (16, 8, 4, 2, 1)),
    (f"{_ACTOR}.ppo_max_token_len_per_gpu", (65536, 32768, 16384, 8192, 4096, 2048, 1024)),
    (f"{_REF}.ulysses_sequence_parallel_size", (2, 4, 8)),
    ("critic.ulysses_sequence_parallel_size", (2, 4, 8)),
    (f"{_ACTOR}.ulysses_sequence_parallel_size", (2, 4, 8)),
    (f"{_ROLLOUT}.free_cache_engine", (True,)),
    (f"{_ROLLOUT}.gpu_memory_utilization", (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2)),
    (f"{_ROLLOUT}.kv_cache_memory_gib", (32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 0.5)),
    (f"{_ROLLOUT}.tensor_model_parallel_size", (2, 4, 8)),
    (f"{_ACTOR}.fsdp_config.optimizer_offload", (True,)),
    (f"{_ACTOR}.fsdp_config.param_offload", (True,)),
    (f"{_MODEL}.enable_activation_offload", (True,)),
)
# Tried after those: settings that need more GPUs.
_MORE_GPUS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("cluster.ref_world_size", (2, 4, 8)),
    ("cluster.reward_model_world_size", (2, 4, 8)),
    ("cluster.critic_world_size", (2, 4, 8)),
    ("cluster.actor_world_size", (2, 4, 8, 16, 32, 64)),
    ("trainer.n_gpus_per_node", (2, 4, 8)),
    ("trainer.nnodes", (2, 4, 8, 16, 32)),
)
_LORA = (f"{_MODEL}.lora_rank", (64, 32, 16))  # changes what is trained, so it is only an alternative


def memory_problems(
    config: RunConfig,
    estimate: Estimate,
    gib: float | None,
    host_gib: float | None,
    *,
    valid: Callable[[RunConfig], bool],
) -> Iterator[Problem]:
    """Reports processes that do not fit in memory, and settings with which they would.

    Args:
        config: the run's config.
        estimate: computes the memory of each role of a config; see `memory_estimate`.
        gib: memory of one GPU, GiB; None: unknown.
        host_gib: CPU memory of the machine that runs all processes, GiB; None: unknown.
        valid: whether a changed config may be suggested.
    """
    found = list(_misfits(config, estimate, gib, host_gib))
    if not found:
        return

    def excess(changed: RunConfig) -> float:
        ok = valid(changed) and not any(problem for rule in PLACEMENT_RULES for problem in rule(changed))
        return sum(gib for _, gib in _misfits(changed, estimate, gib, host_gib)) if ok else float("inf")

    path, texts = f"{_MODEL}.path={config.actor_rollout_ref.model.path}", "; ".join(text for text, _ in found)
    yield Problem(f"{path}: {texts}; {_remedy(config, excess)}", _KEYS)


def fits(config: RunConfig, estimate: Estimate, gib: float) -> bool:
    """Whether every process fits on a GPU of `gib` GiB."""
    return not any(_misfits(config, estimate, gib, None))


def _misfits(config: RunConfig, estimate: Estimate, gib: float | None, host_gib: float | None) -> Iterator[Misfit]:
    roles = estimate(config)
    if roles is None:
        return
    if config.device == "cuda" and gib is not None:
        yield from _on_gpus(config, roles, gib)
    if host_gib is not None:
        yield from _in_machines(config, roles, host_gib)


def _on_gpus(config: RunConfig, roles: list[RoleMemory], gib: float) -> Iterator[Misfit]:
    """Processes that do not fit on their GPU, alone or with the roles that share it."""
    sharing = placement(config).sharing
    together = [role for role in roles if role.role in sharing]
    if together:
        yield from _on_a_shared_gpu(config, {role.role: role for role in together}, gib)
    for role in roles:
        limit, of = gib - CUDA_GIB, f"{CUDA_GIB:g} GiB less than {_gpu(config, gib)}"
        if role.role == "rollout":  # an engine keeps its share of the GPU all the time
            limit, of = _share(config, gib)
        if role.total > limit and (role not in together or role.role == "rollout"):
            needs = f"each {role.role} process needs {_sum(role.parts)}"
            yield f"{needs}, which is more than {limit:.3g} GiB, {of}", role.total - limit


def _on_a_shared_gpu(config: RunConfig, roles: Mapping[str, RoleMemory], gib: float) -> Iterator[Misfit]:
    """One process of each role on one GPU. The actor and the critic take turns with the reference and the reward model,
    which may compute at the same time, unless groups are sampled ahead during updates; and with each other. An engine
    keeps its share of the GPU all the time, unless it sleeps during the update.
    """
    trained = {name: role for name, role in roles.items() if name in TRAINED}
    frozen = {name: role for name, role in roles.items() if name in FOLLOWERS and name not in TRAINED}
    rollout, engine = config.actor_rollout_ref.rollout, roles.get("rollout")
    shares = engine is not None and rollout.kv_cache_memory_gib is None  # which includes the CUDA context
    held = 0.0 if engine is None else _share(config, gib)[0] if shares else engine.total
    asleep = (CUDA_GIB if shares else 0.0) if rollout.free_cache_engine else held
    beside = {name: each.total if config.trainer.max_staleness else each.between for name, each in frozen.items()}
    waiting = {name: each.between for name, each in trained.items()}
    moments = [{"rollout": asleep} | waiting | {name: each.total} | beside for name, each in trained.items()]
    computes = {"actor": config.needs_old_log_probs, "critic": True}
    passes = {name: max(each.forward if computes[name] else 0.0, each.between) for name, each in trained.items()}
    moments.append({"rollout": held} | passes | {name: each.total for name, each in frozen.items()})
    parts = max(moments, key=lambda each: sum(each.values()))
    parts["CUDA of each process"] = CUDA_GIB * (len(roles) - shares)
    if sum(parts.values()) > gib:
        needs = f"{' and '.join(roles)}, which share a GPU, need {_sum(parts)}"
        shares_of = "; ".join(f"the {name}: {_sum(role.parts)}" for name, role in trained.items())
        yield (
            f"{needs}, which is more than {_gpu(config, gib)} ({shares_of})",
            sum(parts.values()) - gib,
        )


def _in_machines(config: RunConfig, roles: list[RoleMemory], gib: float) -> Iterator[Misfit]:
    """Whether the processes of a machine fit in its CPU memory, which without GPUs also holds their tensors."""
    counts, on_cpu = placement(config).world_sizes, config.device == "cpu"
    each = {role.role: role.host_total + (role.total if on_cpu else 0.0) for role in roles}
    needed = sum(each[name] * counts[name] for name in each) / config.trainer.nnodes
    if needed > gib:
        listed = ", ".join(f"{counts[name]} {name} with {size:.3g} GiB" for name, size in each.items())
        yield f"{listed} need {needed:.3g} GiB of CPU memory a machine, and it has {gib:.3g} GiB", needed - gib


def _share(config: RunConfig, gib: float) -> tuple[float, str]:
    """GiB of a GPU that an engine may use, and a description of that limit for messages."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.kv_cache_memory_gib is not None:
        return gib - CUDA_GIB, f"{CUDA_GIB:g} GiB less than {_gpu(config, gib)}"
    share = rollout.gpu_memory_utilization
    return gib * share, f"{_ROLLOUT}.gpu_memory_utilization={share:g} of {_gpu(config, gib)}"


def _gpu(config: RunConfig, gib: float) -> str:
    asked = config.cluster.gpu_memory_gib
    return f"the {gib:.3g} GiB of a GPU of this machine" if asked is None else f"cluster.gpu_memory_gib={asked:g}"


def _sum(parts: Mapping[str, float]) -> str:
    listed = [f"{name} {size:.3g}" for name, size in parts.items() if size]
    return f"{' + '.join(listed)} = {sum(parts.values()):.3g} GiB"


# --- remedies ------------------------------------------------------------------------------------------------------
def _remedy(config: RunConfig, excess: Callable[[RunConfig], float]) -> str:
    """One setting that makes the run fit, else the fewest and mildest several, else more GPUs; or LoRA."""
    settings, gpus, lora = (
        {key: [value for value in values if _milder(config, key, value)] for key, values in remedies}
        for remedies in (_REMEDIES, _MORE_GPUS, (_LORA,))
    )
    if found := fitting_settings(config, settings, gpus, excess, alternative=lora):
        return f"set {found}"
    return f"use a smaller model, larger GPUs, more machines (trainer.nnodes), or LoRA ({_MODEL}.lora_rank)"


def _milder(config: RunConfig, key: str, value: Any) -> bool:
    """Whether a value is worth trying: it differs from the present one, towards less memory or more GPUs."""
    now = value_of(config, key)
    if isinstance(value, bool):
        return now != value
    if key.startswith(("cluster.", "trainer.")) or key.endswith("_parallel_size"):
        return config.device == "cuda" and (now is None or value > now)
    if key.endswith("lora_rank"):
        return now == 0 or value < now
    if key.endswith("gpu_memory_utilization"):
        return config.device == "cuda" and value != now
    if key.endswith("ppo_max_token_len_per_gpu"):
        section = config.critic if key.startswith("critic.") else config.actor_rollout_ref.actor
        return section.use_dynamic_bsz and value < now
    return now is not None and value < now
