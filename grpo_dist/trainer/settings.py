"""From the config's sections to what each part is built from: plain settings, without the config itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from grpo_dist.config.problems import value_of
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.config.schema_roles import AgentConfig
from grpo_dist.data.step_tokens import step_form
from grpo_dist.engines.settings import EngineSettings, PassLimits, SamplingSettings
from grpo_dist.plan.placement import Placement
from grpo_dist.plan.roles import Role, held_by
from grpo_dist.plugins.names import absolute
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.runtime.event_loop import TimeLimits
from grpo_dist.trainer.loss_settings import objective_settings, target_settings
from grpo_dist.trainer.model_settings import model_settings
from grpo_dist.trainer.run_prompts import template_kwargs
from grpo_dist.workers.gang import PolicySettings
from grpo_dist.workers.reward_model import RewardModelSettings
from grpo_dist.workers.scorer import OverlongPenalty, RewardSettings


def rank_settings(config: JobConfig, row: Role, place: Placement, num_steps: int) -> PolicySettings:
    """Return what the ranks of a row of the table of roles are built from, in a run of so many training steps."""
    assert isinstance(config, RunConfig | SupervisedConfig)
    own: PolicySettings = load_attribute(row.settings, key="a row of plan/roles.py")(
        config,
        num_steps,
        model=model_settings(config, row, place),
        device=place.device,
        num_threads=place.num_threads[row.name],
        seed=config.trainer.seed,
        collective_timeout_s=config.nccl_timeout,
    )
    return replace(own, teachers=tuple(model_settings(config, row, place, model) for model in held_by(config, row)[1:]))


def actor_settings(config: RunConfig, num_steps: int, **ranks: Any) -> PolicySettings:
    """Return the settings of the actor's ranks; `ranks` is what `rank_settings` says of all roles'."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    mini_batches = config.data.train_batch_size // actor.ppo_mini_batch_size
    return PolicySettings(
        **ranks,
        temperature=rollout.temperature,
        columns=config.old_policy_columns,
        forward=_limits(config, "actor_rollout_ref.rollout.log_prob_", actor.log_prob_max_token_len(rollout)),
        update=_limits(config, "actor_rollout_ref.actor.ppo_", actor.max_token_len),
        optimizer=actor.optim,
        total_steps=num_steps * actor.ppo_epochs * mini_batches,
        grad_clip=actor.grad_clip,
        reference_columns=reference_columns(config) if config.actor_is_reference else (),
        keeps_output_layer=objective_settings(config).needs_head and not config.has_teacher,
        weight_bucket_bytes=rollout.checkpoint_engine.bucket_bytes,
    )


def critic_settings(config: RunConfig, num_steps: int, **ranks: Any) -> PolicySettings:
    """Return the settings of the critic's ranks; see `actor_settings`."""
    critic = config.critic
    mini_batches = config.data.train_batch_size // critic.ppo_mini_batch_size
    return PolicySettings(
        **ranks,
        temperature=1.0,
        columns=("values",),
        forward=_limits(config, "critic.forward_", critic.forward_max_token_len),
        update=_limits(config, "critic.ppo_", critic.max_token_len),
        optimizer=critic.optim,
        total_steps=num_steps * critic.ppo_epochs * mini_batches,
        grad_clip=critic.grad_clip,
    )


def reference_settings(config: RunConfig, num_steps: int, **ranks: Any) -> PolicySettings:
    """Return the settings of the reference's ranks; see `actor_settings`."""
    roles = config.actor_rollout_ref
    return PolicySettings(
        **ranks,
        temperature=roles.rollout.temperature,
        columns=reference_columns(config),
        forward=_limits(config, "actor_rollout_ref.ref.log_prob_", roles.actor.log_prob_max_token_len(roles.ref)),
    )


def reward_model_settings(config: RunConfig, num_steps: int, **ranks: Any) -> RewardModelSettings:
    """Return the settings of the reward model's ranks; see `actor_settings`."""
    section = config.reward_model
    retrain, tokens = section.retrain, section.max_token_len(config.actor_rollout_ref.actor)
    again = _limits(config, "reward_model.retrain.", retrain.max_token_len_per_gpu)
    return RewardModelSettings(
        **ranks,
        temperature=1.0,
        columns=(),
        forward=replace(_limits(config, "reward_model.", tokens), budget="forward_max_token_len"),
        update=replace(again, lengths="reward_model.max_length") if section.is_retrained else None,
        optimizer=retrain.optim if section.is_retrained else None,
        grad_clip=retrain.grad_clip,
        section=section,
        trust_input_tokenizer=config.actor_rollout_ref.model.trust_remote_code,
        steps=step_form(config),
    )


def supervised_settings(config: SupervisedConfig, num_steps: int, **ranks: Any) -> PolicySettings:
    """Return the settings of the ranks of a command that trains one model; see `actor_settings`."""
    limits = replace(_limits(config, "data.", config.data.max_token_len), lengths="data.max_length")
    return PolicySettings(
        **ranks,
        temperature=1.0,
        columns=(),
        forward=limits,
        update=limits,
        optimizer=config.optim,
        total_steps=num_steps,
        grad_clip=config.optim.clip_grad,
    )


def _limits(config: JobConfig, keys: str, max_token_len: int | None) -> PassLimits:
    """Return the limits of the passes whose keys begin with `keys`."""
    return PassLimits(keys, value_of(config, f"{keys}micro_batch_size_per_gpu"), max_token_len)


def reference_columns(config: RunConfig) -> tuple[str, ...]:
    """Return the columns that the reference is asked for."""
    wanted = {*objective_settings(config).columns, *target_settings(config).columns}
    return tuple(name for name in ("ref_log_probs", "ref_hidden_states") if name in wanted)


def reward_settings(config: RunConfig) -> RewardSettings:
    """Return what a reward process is built from."""
    model, code = config.actor_rollout_ref.model, config.reward_code
    buffer = config.reward.overlong_buffer
    teaching, needs = config.algorithm.self_distillation, target_settings(config).needs
    penalty = OverlongPenalty(config.data.max_response_length, config.overlong_buffer_len, buffer.penalty_factor)
    return RewardSettings(
        model.path,
        model.trust_remote_code,
        *code,
        timeout_s=config.reward.timeout_s,
        failure_score=config.reward.failure_score,
        overlong_penalty=penalty if buffer.enable else None,
        function_weight=config.actor_rollout_ref.rollout.agent.reward_function_weight,
        step_separator=config.reward.step_separator if "step_mask" in needs else None,
        by_turn="turn_rewards" in needs,
        by_agent=config.algorithm.credit == "agent",
        label=config.reward_model.retrain.label if config.reward_model.is_retrained else None,
        self_distillation=teaching if teaching.enable else None,
        template_kwargs=template_kwargs(config) if teaching.enable else {},
        teacher=config.actor_rollout_ref.ref.model.endpoint if config.teacher_is_elsewhere else None,
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
        max_episode_len=max(config.max_model_len, config.actor_rollout_ref.actor.max_token_len or 0),
        seed=config.trainer.seed + index,  # with equal seeds, engines would sample the same
        needs_tokenizer=bool(rollout.stop or rollout.bad_words) or not agent.is_single_turn,
        template_kwargs=template_kwargs or {},
        weight_transport=rollout.checkpoint_engine.resolved_backend(place.device, shares_gpu=place.shares_gpu),
        shares_gpu=place.shares_gpu,
        collective_timeout_s=config.actor_rollout_ref.nccl_timeout,
        profile_dir=None if profiles is None else str(profiles.absolute() / f".rollout{index}"),
        min_group_size=config.algorithm.min_group_size,
        records_routes=config.replays_routes,
    )


def time_limits(config: JobConfig) -> TimeLimits:
    """Return how long a worker may take to answer."""
    if not isinstance(config, RunConfig):
        return TimeLimits(config.trainer.worker_timeout_s)
    stages = {"start": config.actor_rollout_ref.rollout.startup_timeout_s}
    stages |= {stage: limit for stage, limit in config.trainer.stage_timeout_s.items() if limit is not None}
    return TimeLimits(config.trainer.worker_timeout_s, stages)
