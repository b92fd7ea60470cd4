"""From the config's sections to what each part is built from: plain settings, without the config itself."""

from __future__ import annotations

import math
from dataclasses import replace

from grpo_dist.agents import load_agent_loop
from grpo_dist.algorithms.kl_control import KLController
from grpo_dist.code_names import absolute
from grpo_dist.config.placement import Placement
from grpo_dist.config.schema import KLCtrlConfig, RunConfig
from grpo_dist.config.schema_models import RetrainConfig
from grpo_dist.config.schema_roles import OptimConfig
from grpo_dist.data.step_tokens import step_form
from grpo_dist.engines.settings import (
    AgentSettings,
    EngineSettings,
    OptimizerSettings,
    SamplingSettings,
    ValueSettings,
)
from grpo_dist.trainer.loss_settings import objective_settings, target_settings
from grpo_dist.trainer.model_settings import actor_model, critic_model, lora_settings, reference_model, reward_model
from grpo_dist.trainer.run_prompts import template_kwargs
from grpo_dist.workers.limits import TimeLimits
from grpo_dist.workers.policy import PolicySettings
from grpo_dist.workers.reward import OverlongPenalty, RewardSettings
from grpo_dist.workers.reward_model import RewardModelSettings


def policy_settings(config: RunConfig, place: Placement, num_steps: int) -> PolicySettings:
    """What the actor's ranks are built from."""
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
        optimizer=optimizer_settings(actor.optim, steps),
        train_micro_batch_size=actor.ppo_micro_batch_size_per_gpu,
        train_max_token_len=actor.max_token_len,
        grad_clip=actor.grad_clip,
        reference_columns=reference_columns(config) if config.actor_is_reference else (),
        sends_factors=config.sends_factors,
        keeps_output_layer=objective_settings(config).exact_kl and not config.has_teacher,
        weight_bucket_bytes=rollout.checkpoint_engine.update_weights_bucket_megabytes << 20,
    )


def optimizer_settings(optim: OptimConfig, steps: int) -> OptimizerSettings:
    """The optimizer of a role that takes so many optimizer steps."""
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else math.floor(optim.lr_warmup_steps_ratio * steps)
    return OptimizerSettings(
        optim.lr, optim.weight_decay, optim.betas, optim.lr_scheduler_type, warmup, steps, optim.min_lr_ratio
    )


def critic_settings(config: RunConfig, place: Placement, num_steps: int) -> PolicySettings:
    """What the critic's ranks are built from; a model without a head gets one, drawn with the run's seed."""
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
        optimizer=optimizer_settings(critic.optim, num_steps * critic.ppo_epochs * mini_batches),
        train_micro_batch_size=critic.ppo_micro_batch_size_per_gpu,
        train_max_token_len=critic.max_token_len,
        grad_clip=critic.grad_clip,
    )


def value_settings(config: RunConfig) -> ValueSettings:
    """The critic's loss."""
    longest = config.actor_rollout_ref.actor.loss_scale_factor or config.data.max_response_length
    return ValueSettings(config.critic.cliprange_value, config.critic.loss_agg_mode, longest)


def reference_settings(config: RunConfig, place: Placement) -> PolicySettings:
    """What the reference's ranks are built from: the same model or a teacher, frozen, held in its compute type or, if
    it moves by small shares, in fp32.
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
    """What the reference is asked for."""
    wanted = {*objective_settings(config).columns, *target_settings(config).columns}
    return tuple(name for name in ("ref_log_probs", "ref_hidden_states") if name in wanted)


def reward_model_settings(config: RunConfig, place: Placement) -> RewardModelSettings:
    """What the reward model's ranks are built from."""
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
        optimizer=_retraining(retrain) if section.is_retrained else None,
        train_micro_batch_size=retrain.micro_batch_size_per_gpu,
        train_max_token_len=retrain.max_token_len_per_gpu,
        grad_clip=retrain.grad_clip,
        steps=step_form(config),
        judging_tokens=section.process.judging_tokens,
    )


def _retraining(retrain: RetrainConfig) -> OptimizerSettings:
    """The optimizer of the reward model; the number of its steps depends on how many responses are different."""
    optim = retrain.optim
    return OptimizerSettings(optim.lr, optim.weight_decay, optim.betas, "constant", 0, 1, 1.0)


def reward_settings(config: RunConfig) -> RewardSettings:
    """What a reward process is built from."""
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
    """How training and validation sample; where training is seeded, each prompt gets a seed of its own later."""
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


def engine_settings(config: RunConfig, place: Placement, index: int) -> EngineSettings:
    """What rollout engine `index` is started with."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    profiles = config.trainer.profile_dir if config.trainer.profile_steps else None
    return EngineSettings(
        model_path=model.path,
        device=place.device,
        dtype=rollout.resolved_dtype(config.default_dtype),
        trust_remote_code=model.trust_remote_code,
        tensor_parallel_size=place.tensor_parallel,
        max_model_len=config.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_memory_gib=rollout.kv_cache_memory_gib,
        enforce_eager=rollout.enforce_eager,
        enable_chunked_prefill=rollout.enable_chunked_prefill,
        seed=config.trainer.seed + index,  # with equal seeds, engines would sample the same
        override_config=model.override_config,
        engine_kwargs={name: value for name, value in rollout.engine_kwargs.vllm.items() if value is not None},
        needs_tokenizer=bool(rollout.stop or rollout.bad_words) or not rollout.agent.is_single_turn,
        clear_kv_cache_on_update=rollout.clear_kv_cache_on_update,
        partial_rollout=rollout.partial_rollout,
        agent=agent_settings(config),
        weight_transport=rollout.checkpoint_engine.resolved_backend(place.device, shares_gpu=place.shares_gpu),
        free_cache_engine=rollout.free_cache_engine and place.shares_gpu,
        collective_timeout_s=config.actor_rollout_ref.nccl_timeout,
        engine=absolute(rollout.name),
        lora=lora_settings(model) if config.sends_factors else None,
        profile_dir=None if profiles is None else str(profiles.absolute() / f".rollout{index}"),
    )


def time_limits(config: RunConfig) -> TimeLimits:
    """How long a worker may take to answer."""
    stages = {"start": config.actor_rollout_ref.rollout.startup_timeout_s}
    stages |= {stage: limit for stage, limit in config.trainer.stage_timeout_s.items() if limit is not None}
    return TimeLimits(config.trainer.worker_timeout_s, stages)


def agent_settings(config: RunConfig) -> AgentSettings | None:
    """The loop that runs episodes; None where an episode is one turn."""
    agent = config.actor_rollout_ref.rollout.agent
    if agent.is_single_turn:
        return None
    loop = load_agent_loop(agent.default_agent_loop, agent.agent_kwargs)
    return AgentSettings(
        absolute(agent.default_agent_loop),
        loop.resolved(agent.agent_kwargs),
        agent.timeout_s,
        agent.episode_timeout_s,
        agent.max_assistant_turns,
        agent.max_concurrent_episodes,
        agent.endpoint_kwargs,
        template_kwargs(config),
    )


def kl_controller(config: KLCtrlConfig) -> KLController:
    """The controller of the KL penalty in the reward."""
    target = config.target_kl if config.type == "adaptive" else None
    return KLController(config.kl_coef, target, config.horizon)
