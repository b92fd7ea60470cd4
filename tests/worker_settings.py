"""What workers are built from, for tests: sections of the default config with some values changed."""

import functools
from dataclasses import fields, replace
from typing import Any

from grpo_dist.algorithms.settings import ObjectiveSettings, ValueSettings
from grpo_dist.assets import POLICY_KEY, POLICY_SECTION
from grpo_dist.config.schema_roles import (
    ActorConfig,
    ActorRolloutRefConfig,
    AdamWConfig,
    AgentConfig,
    LoraSection,
    LoraSyncConfig,
    ModelConfig,
    PolicyLossConfig,
    RolloutConfig,
)
from grpo_dist.engines.settings import EngineSettings, ModelSettings, PassLimits, RankSettings
from grpo_dist.plan.commands import load_config


@functools.cache
def default_roles() -> ActorRolloutRefConfig:
    """The section of the roles as it is without a word of the user."""
    return load_config([])[0].actor_rollout_ref


def engine_settings(path: str = "", **changes: Any) -> EngineSettings:
    """A small engine on the CPU; changes are of its fields or of keys of its sections."""
    plain = EngineSettings(
        default_roles().rollout, default_roles().model, "cpu", "float32", max_model_len=96, max_episode_len=400, seed=0
    )
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 128, "kv_cache_memory_gib": 0.0625}
    ways = {"enforce_eager": True, "enable_chunked_prefill": False, "gpu_memory_utilization": 0.8}
    return changed(plain, **({"path": path} | limits | ways | changes))


def changed(settings: EngineSettings, **changes: Any) -> EngineSettings:
    """The settings with other values of fields, or of keys of their sections."""
    if "vllm" in changes:
        changes["engine_kwargs"] = {"vllm": changes.pop("vllm")}
    own = {field.name: changes.pop(field.name) for field in fields(settings) if field.name in changes}
    model = {name: changes.pop(name) for name in ModelConfig.model_fields if name in changes}
    assert changes.keys() <= RolloutConfig.model_fields.keys(), changes
    sections = {"rollout": settings.rollout.replaced(**changes), "model": settings.model.replaced(**model)}
    return replace(settings, **(sections | own))


def model_settings(
    path: str = "", lora: LoraSection | None = None, *, merge: bool = True, **changes: Any
) -> ModelSettings:
    """A policy on CPU in float32, without checkpointing; changes are of fields or of keys of its sections.

    With LoRA's keys its factors train, and engines get them merged with the weights, or not.
    """
    factors = {} if lora is None else dict(lora)
    model = default_roles().model.replaced(
        enable_gradient_checkpointing=False, lora=LoraSyncConfig(merge=merge), **factors
    )
    keys = {"sequence_parallel_key": "actor_rollout_ref.actor.ulysses_sequence_parallel_size"}
    keys["layers_key"] = POLICY_SECTION
    keys["room"] = "set actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"
    plain = ModelSettings(model, default_roles().actor.fsdp_config, model, POLICY_KEY, path, "fp32", "fp32")
    changes = keys | changes
    own = {field.name: changes.pop(field.name) for field in fields(plain) if field.name in changes}
    held = {name: changes.pop(name) for name in type(plain.fsdp_config).model_fields if name in changes}
    assert changes.keys() <= ModelConfig.model_fields.keys(), changes
    model, shards = model.replaced(**changes), plain.fsdp_config.replaced(**held)
    return replace(plain, **({"model": model, "layers": model, "fsdp_config": shards} | own))


def policy_settings(model: ModelSettings, **changes: Any) -> RankSettings:
    """An actor's rank on the CPU, in passes of 4 sequences; changes are of fields."""
    plain = RankSettings(
        model=model,
        device="cpu",
        num_threads=1,
        temperature=1.0,
        columns=("old_log_probs",),
        forward=PassLimits("actor_rollout_ref.rollout.log_prob_", 4),
        collective_timeout_s=240.0,
        seed=1,
        optimizer=AdamWConfig(lr=1e-2, weight_decay=0.0, betas=(0.9, 0.999), override_optimizer_config=None),
    )
    return replace(plain, **changes)


def changed_sizes(settings: RankSettings, *, forward: int = 0, update: int = 0, **changes: Any) -> RankSettings:
    """The settings of ranks with other numbers of sequences in their passes; 0: as they are."""
    sizes = {name: size for name, size in (("forward", forward), ("update", update)) if size}
    limits = {name: replace(getattr(settings, name), micro_batch_size=size) for name, size in sizes.items()}
    return replace(settings, **(limits | changes))


def objective_settings(**changes: Any) -> ObjectiveSettings:
    """The plain clipped loss; changes are of fields, or of keys of the actor's section and its `policy_loss`."""
    actor = default_roles().actor.replaced(use_kl_loss=False, loss_agg_mode="token-mean")
    return changed_objective(ObjectiveSettings(actor), **changes)


def changed_objective(settings: ObjectiveSettings, **changes: Any) -> ObjectiveSettings:
    """The settings with other values of fields, or of keys of the actor's section and its `policy_loss`."""
    own = {field.name: changes.pop(field.name) for field in fields(settings) if field.name in changes}
    loss = {name: changes.pop(name) for name in PolicyLossConfig.model_fields if name in changes}
    assert changes.keys() <= ActorConfig.model_fields.keys(), changes
    actor = settings.actor.replaced(policy_loss=settings.actor.policy_loss.replaced(**loss), **changes)
    return replace(settings, **({"actor": actor} | own))


def value_settings(cliprange_value: float, loss_agg_mode: str, length: float | None = None) -> ValueSettings:
    """The critic's loss."""
    critic = load_config([])[0].critic.replaced(cliprange_value=cliprange_value, loss_agg_mode=loss_agg_mode)
    return ValueSettings(critic, length)


def agent(name: str, kwargs: dict[str, Any] | None = None, **limits: Any) -> AgentConfig:
    """The section of an agent loop."""
    return default_roles().rollout.agent.replaced(default_agent_loop=name, agent_kwargs=kwargs or {}, **limits)


def lora(rank: int = 4, alpha: float = 8.0, targets: tuple[str, ...] = ("all-linear",), **keys: Any) -> LoraSection:
    """LoRA's keys of a model that belongs to no hub."""
    values = {"path": "builtin:", "exclude_modules": None, "lora_adapter_path": None} | keys
    return LoraSection(lora_rank=rank, lora_alpha=alpha, target_modules=targets, **values)
