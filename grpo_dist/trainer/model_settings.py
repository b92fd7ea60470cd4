"""From the config's sections to how each model is loaded, sharded and fed. Imports neither Ray nor vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_dist.assets import (
    CRITIC_KEY,
    REWARD_MODEL_KEY,
    TEACHER_KEY,
    TEACHER_SECTION,
    TRAINED_MODEL_KEY,
)
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import SFTConfig, SupervisedConfig
from grpo_dist.config.schema_roles import FSDPConfig
from grpo_dist.engines.settings import (
    CRITIC_ROOM,
    REF_ROOM,
    REWARD_MODEL_ROOM,
    SUPERVISED_ROOM,
    ModelSettings,
    choose_layout,
)
from grpo_dist.plan.placement import Placement


def actor_model(config: RunConfig, place: Placement) -> ModelSettings:
    """The policy, as it trains."""
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    policy = _policy(config, place, fsdp.model_dtype, fsdp.resolved_dtype(config.default_dtype))
    model = replace(policy, activation_offload=config.actor_rollout_ref.model.enable_activation_offload)
    return _split(config, "actor", _sharded(model, fsdp))


def critic_model(config: RunConfig, place: Placement) -> ModelSettings:
    """The critic; a model without a head gets one, drawn with the run's seed."""
    critic, fsdp = config.critic, config.critic.model.fsdp_config
    model = replace(
        _policy(config, place, fsdp.model_dtype, fsdp.resolved_dtype(config.default_dtype)),
        path=critic.model.path,
        key=CRITIC_KEY,
        room=CRITIC_ROOM,
        num_labels=1,
        new_head_seed=config.trainer.seed,
        small_new_head=True,
        trust_remote_code=False,
        override_config=critic.model.override_config,
        lora=None,
        gradient_checkpointing=critic.model.enable_gradient_checkpointing,
        activation_offload=critic.model.enable_activation_offload,
        reshard_after_forward=fsdp.reshard_after_forward,
    )
    return _split(config, "critic", _sharded(model, fsdp))


def reference_model(config: RunConfig, place: Placement) -> ModelSettings:
    """The reference: the same model or a teacher, held in its compute type or, if it moves by small shares, in fp32."""
    ref = config.actor_rollout_ref.ref
    dtype = ref.fsdp_config.resolved_dtype(config.default_dtype)
    model = replace(
        _policy(config, place, ref.weights_dtype(config.default_dtype), dtype),
        lora=None,
        param_offload=ref.fsdp_config.param_offload,
        room=REF_ROOM,
    )
    if ref.model.path is not None:
        model = replace(
            model,
            path=ref.model.path,
            key=TEACHER_KEY,
            section=TEACHER_SECTION,
            trust_remote_code=ref.model.trust_remote_code,
            override_config=ref.model.override_config,
        )
    return _split(config, "ref", model)


def reward_model(config: RunConfig, place: Placement) -> ModelSettings:
    """The reward model, frozen or trained between iterations; its ranks find its outputs in its folder."""
    section = config.reward_model
    assert section.model.path is not None, "a rule asks for it"
    dtype, retrain = section.model.fsdp_config.resolved_dtype(config.default_dtype), section.retrain
    return replace(
        _policy(config, place, retrain.model_dtype if section.is_retrained else dtype, dtype),
        path=section.model.path,
        key=REWARD_MODEL_KEY,
        room=REWARD_MODEL_ROOM,
        num_labels=1,
        trust_remote_code=section.model.trust_remote_code,
        override_config={},
        lora=None,
        gradient_checkpointing=section.is_retrained and retrain.enable_gradient_checkpointing,
        optimizer_offload=retrain.optimizer_offload,
        max_model_len=section.max_length or config.max_model_len,
        param_offload=section.model.fsdp_config.param_offload,
    )


def trained_model(config: SupervisedConfig, place: Placement) -> ModelSettings:
    """Return the model of a command that trains one."""
    model, engine = config.model, config.engine
    # of a causal LM LoRA's factors; of a reward model its linear head, drawn with the run's seed where there is none
    if isinstance(config, SFTConfig):
        head: dict[str, Any] = {"lora": config.model if config.model.trains_factors else None}
    else:
        head = {"num_labels": 1, "new_head_seed": config.trainer.seed}
    return ModelSettings(
        path=model.path,
        trust_remote_code=model.trust_remote_code,
        model_dtype=engine.model_dtype,
        compute_dtype=engine.resolved_dtype(config.default_dtype),
        gradient_checkpointing=model.enable_gradient_checkpointing,
        reshard_after_forward=engine.reshard_after_forward,
        layout=choose_layout(use_remove_padding=model.use_remove_padding, use_prefix_grouper=True),
        fsdp_size=engine.fsdp_size,
        defer_grad_sync=engine.defer_grad_sync,
        override_config=model.override_config,
        param_offload=engine.param_offload,
        optimizer_offload=engine.optimizer_offload,
        max_model_len=config.data.max_length,
        key=TRAINED_MODEL_KEY,
        section="model",
        room=SUPERVISED_ROOM,
        shares_gpu=bool(place.sharing),
        **head,
    )


def _sharded(model: ModelSettings, fsdp: FSDPConfig) -> ModelSettings:
    """A model that trains, held as its section says."""
    return replace(
        model,
        fsdp_size=fsdp.fsdp_size,
        param_offload=fsdp.param_offload,
        optimizer_offload=fsdp.optimizer_offload,
        defer_grad_sync=fsdp.defer_grad_sync,
    )


def _split(config: RunConfig, role: str, model: ModelSettings) -> ModelSettings:
    """A role's model, with the number of ranks that split its micro-batches."""
    section = role if role == "critic" else f"actor_rollout_ref.{role}"
    return replace(
        model,
        sequence_parallel_size=config.sequence_parallel_size(role),
        sequence_parallel_key=f"{section}.ulysses_sequence_parallel_size",
    )


def _policy(config: RunConfig, place: Placement, model_dtype: str, compute_dtype: str) -> ModelSettings:
    """Return what all models of a run have in common: the policy's settings, held in these types."""
    model = config.actor_rollout_ref.model
    return ModelSettings(
        path=model.path,
        trust_remote_code=model.trust_remote_code,
        model_dtype=model_dtype,
        compute_dtype=compute_dtype,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        reshard_after_forward=config.actor_rollout_ref.actor.fsdp_config.reshard_after_forward,
        override_config=model.override_config,
        lora=model if model.trains_factors else None,
        max_model_len=config.max_model_len,
        layout=choose_layout(
            use_remove_padding=model.use_remove_padding,
            use_prefix_grouper=config.actor_rollout_ref.actor.use_prefix_grouper,
        ),
        shares_gpu=bool(place.sharing),
    )
