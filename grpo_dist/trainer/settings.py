"""From the config's sections to what each part is built from: plain settings, without the config itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from grpo_dist.algorithms.kl import KLController
from grpo_dist.algorithms.settings import ValueSettings
from grpo_dist.config.schema import KLCtrlConfig, RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.config.schema_roles import AgentConfig
from grpo_dist.data.step_tokens import step_form
from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from grpo_dist.plan.placement import Placement
from grpo_dist.plugins.names import absolute
from grpo_dist.roles.policy import PolicySettings
from grpo_dist.roles.reward import OverlongPenalty, RewardSettings
from grpo_dist.roles.reward_model import RewardModelSettings
from grpo_dist.runtime.event_loop import TimeLimits
from grpo_dist.trainer.loss_settings import objective_settings, target_settings
from grpo_dist.trainer.model_settings import (
    actor_model,
    critic_model,
    reference_model,
    reward_model,
    trained_model,
)


def policy_settings(config: RunConfig, place: Placement, num_steps: int) -> PolicySettings:
    """Return what the actor's ranks are built from."""
    actor, rollout, data = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    steps = num_steps * actor.ppo_epochs * (data.train_batch_size // actor.ppo_mini_batch_size)
    return PolicySettings(
        model=actor_model(config, place),
        device=place.device,
        num_threads=place.num_threads["actor"],
        temperature=rollout.temperature,
        columns=("old_log_probs", "old_entropies") if actor.top_entropy_quantile < 1 else ("old_log_probs",),
        log_prob_micro_batch_size=rollout.log_prob_micro_batch_size_per_gpu,
        log_prob_max_token_len=actor.log_prob_max_token_len(rollout),
        seed=config.trainer.seed,
        collective_timeout_s=config.actor_rollout_ref.nccl_timeout,
        optimizer=actor.optim,
        total_steps=steps,
        train_micro_batch_size=actor.ppo_micro_batch_size_per_gpu,
        train_max_token_len=actor.max_token_len,
        grad_clip=actor.grad_clip,
        reference_columns=reference_columns(config) if config.actor_is_reference else (),
        sends_factors=config.actor_rollout_ref.model.sends_factors,
        keeps_output_layer=objective_settings(config).exact_kl and not config.has_teacher,
        weight_bucket_bytes=rollout.checkpoint_engine.update_weights_bucket_megabytes << 20,
    )


def critic_settings(config: RunConfig, place: Placement, num_steps: int) -> PolicySettings:
    """Return what the critic's ranks are built from; a model without a head gets one, drawn with the run's seed."""
    critic = config.critic
    mini_batches = config.data.train_batch_size // critic.ppo_mini_batch_size
    return PolicySettings(
        model=critic_model(config, place),
        device=place.device,
        num_threads=place.num_threads["critic"],
        temperature=1.0,
        columns=("values",),
        log_prob_micro_batch_size=critic.forward_micro_batch_size_per_gpu,
        log_prob_max_token_len=critic.forward_max_token_len,
        seed=config.trainer.seed,
        collective_timeout_s=config.actor_rollout_ref.nccl_timeout,
        optimizer=critic.optim,
        total_steps=num_steps * critic.ppo_epochs * mini_batches,
        train_micro_batch_size=critic.ppo_micro_batch_size_per_gpu,
        train_max_token_len=critic.max_token_len,
        grad_clip=critic.grad_clip,
    )


def supervised_settings(config: SupervisedConfig, place: Placement, num_steps: int) -> PolicySettings:
    """Return what the ranks of a command that trains one model are built from."""
    data, optim = config.data, config.optim
    return PolicySettings(
        model=trained_model(config, place),
        device=place.device,
        num_threads=place.num_threads[config.role],
        temperature=1.0,
        columns=(),
        log_prob_micro_batch_size=data.micro_batch_size_per_gpu,
        seed=config.trainer.seed,
        collective_timeout_s=config.trainer.nccl_timeout,
        optimizer=optim,
        total_steps=num_steps,
        train_micro_batch_size=data.micro_batch_size_per_gpu,
        train_max_token_len=data.max_token_len,
        grad_clip=optim.clip_grad,
    )


def value_settings(config: RunConfig) -> ValueSettings:
    """The critic's loss."""
    longest = config.actor_rollout_ref.actor.loss_scale_factor or config.data.max_response_length
    return ValueSettings(config.critic.cliprange_value, config.critic.loss_agg_mode, longest)


def reference_settings(config: RunConfig, place: Placement) -> PolicySettings:
    """Return what the reference's ranks are built from: the same model or a teacher, frozen, held in its compute type
    or, if it moves by small shares, in fp32.
    """
    ref = config.actor_rollout_ref.ref
    return PolicySettings(
        model=reference_model(config, place),
        device=place.device,
        num_threads=place.num_threads["ref"],
        temperature=config.actor_rollout_ref.rollout.temperature,
        columns=reference_columns(config),
        log_prob_micro_batch_size=ref.log_prob_micro_batch_size_per_gpu,
        log_prob_max_token_len=config.actor_rollout_ref.actor.log_prob_max_token_len(ref),
        seed=config.trainer.seed,
        collective_timeout_s=config.actor_rollout_ref.nccl_timeout,
    )


def reference_columns(config: RunConfig) -> tuple[str, ...]:
    """Return what the reference is asked for."""
    wanted = {*objective_settings(config).columns, *target_settings(config).columns}
    return tuple(name for name in ("ref_log_probs", "ref_hidden_states") if name in wanted)


def reward_model_settings(config: RunConfig, place: Placement) -> RewardModelSettings:
    """Return what the reward model's ranks are built from."""
    section, policy = config.reward_model, config.actor_rollout_ref.model
    retrain = section.retrain
    return RewardModelSettings(
        model=reward_model(config, place),
        device=place.device,
        num_threads=place.num_threads["reward_model"],
        temperature=1.0,
        columns=(),
        log_prob_micro_batch_size=section.micro_batch_size_per_gpu,
        log_prob_max_token_len=section.max_token_len(config.actor_rollout_ref.actor),
        seed=config.trainer.seed,
        collective_timeout_s=config.actor_rollout_ref.nccl_timeout,
        input_tokenizer=section.model.input_tokenizer,
        trust_input_tokenizer=policy.trust_remote_code,
        max_length=section.max_length,
        optimizer=retrain.optim if section.is_retrained else None,
        train_micro_batch_size=retrain.micro_batch_size_per_gpu,
        train_max_token_len=retrain.max_token_len_per_gpu,
        grad_clip=retrain.grad_clip,
        steps=step_form(config),
        judging_tokens=section.process.judging_tokens,
    )


def reward_settings(config: RunConfig) -> RewardSettings:
    """Return what a reward process is built from."""
    model, code = config.actor_rollout_ref.model, config.reward_code
    buffer = config.reward.overlong_buffer
    penalty = OverlongPenalty(config.data.max_response_length, config.overlong_buffer_len, buffer.penalty_factor)
    return RewardSettings(
        model.path,
        model.trust_remote_code,
        *code,
        timeout_s=config.reward.timeout_s,
        failure_score=config.reward.failure_score,
        overlong_penalty=penalty if buffer.enable else None,
        function_weight=config.actor_rollout_ref.rollout.agent.reward_function_weight,
        step_separator=config.reward.step_separator if "step_mask" in target_settings(config).needs else None,
        label=config.reward_model.retrain.label if config.reward_model.is_retrained else None,
    )


def sampling_settings(config: RunConfig) -> tuple[SamplingSettings, SamplingSettings]:
    """Return how training and validation sample; where training is seeded, each prompt gets a seed of its own later."""
    rollout, val = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    training = SamplingSettings(
        n=rollout.n,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=config.data.max_response_length,
        seed=0 if rollout.resolved_deterministic(config.device) else None,
        ignore_eos=rollout.ignore_eos,
        min_p=rollout.min_p,
        min_tokens=rollout.min_tokens,
        stop=rollout.stop,
        bad_words=rollout.bad_words,
    )
    validation = replace(
        training,
        n=val.n,
        temperature=val.temperature if val.do_sample else 0.0,
        top_p=val.top_p,
        top_k=val.top_k,
        seed=config.trainer.seed if val.do_sample else None,
        ignore_eos=False,
        min_p=0.0,
    )
    return training, validation


def engine_settings(
    config: RunConfig,
    place: Placement,
    index: int,
    agent: AgentConfig | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> EngineSettings:
    """Return what rollout engine `index` is started with.

    Args:
        config: of the run.
        place: its processes.
        index: of the engine.
        agent: the section of the agent loop as workers get it; None: an episode is one response.
        template_kwargs: variables of the chat template; None: there are none.
    """
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    profiles = config.trainer.profile_dir if config.trainer.profile_steps else None
    agent = agent or rollout.agent
    return EngineSettings(
        rollout=rollout.replaced(name=absolute(rollout.name), agent=agent),
        model=model,
        device=place.device,
        dtype=rollout.resolved_dtype(config.default_dtype),
        max_model_len=config.max_model_len,
        seed=config.trainer.seed + index,  # with equal seeds, engines would sample the same
        needs_tokenizer=bool(rollout.stop or rollout.bad_words) or not agent.is_single_turn,
        template_kwargs=template_kwargs or {},
        weight_transport=rollout.checkpoint_engine.resolved_backend(place.device, shares_gpu=place.shares_gpu),
        shares_gpu=place.shares_gpu,
        collective_timeout_s=config.actor_rollout_ref.nccl_timeout,
        profile_dir=None if profiles is None else str(profiles.absolute() / f".rollout{index}"),
    )


def time_limits(config: JobConfig) -> TimeLimits:
    """Return how long a worker may take to answer."""
    if not isinstance(config, RunConfig):
        return TimeLimits(config.trainer.worker_timeout_s)
    stages = {"start": config.actor_rollout_ref.rollout.startup_timeout_s}
    stages |= {stage: limit for stage, limit in config.trainer.stage_timeout_s.items() if limit is not None}
    return TimeLimits(config.trainer.worker_timeout_s, stages)


def kl_controller(config: KLCtrlConfig) -> KLController:
    """The controller of the KL penalty in the reward."""
    target = config.target_kl if config.type == "adaptive" else None
    return KLController(config.kl_coef, target, config.horizon)
