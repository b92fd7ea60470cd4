"""From the config's sections to what advantages and the policy's loss are made of. Imports neither Ray nor vLLM."""

from __future__ import annotations

from grpo_dist.algorithms.settings import ObjectiveSettings, ValueSettings
from grpo_dist.algorithms.targets import TargetSettings
from grpo_dist.config.schema import RunConfig
from grpo_dist.plugins.names import TOKEN_SELECTING_LOSSES, absolute

# Keys of algorithm.rollout_correction that say how weights and masks are made, wherever that is.
CORRECTION = {"rollout_is_threshold", "rollout_rs", "rollout_rs_threshold"}


def target_settings(config: RunConfig) -> TargetSettings:
    """Return what advantages, corrections and targets are computed with, before the loss."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    correction = algorithm.rollout_correction
    return TargetSettings(
        adv_estimator=absolute(algorithm.adv_estimator),
        options=dict(algorithm),
        kl_penalty=absolute(algorithm.kl_penalty) if algorithm.use_kl_in_reward else None,
        rollout_correction=correction.model_dump(include={*CORRECTION, "rollout_is_batch_normalize"})
        | {"rollout_is": config.rollout_is},
        m2_threshold=correction.m2_threshold,
        old_log_probs_from=config.old_log_probs_from,
        mask_truncated=algorithm.mask_truncated_responses,
        mask_equal_groups=algorithm.mask_equal_groups,
        top_entropy_quantile=actor.top_entropy_quantile,
        loss_mode=absolute(actor.policy_loss.loss_mode),
        loss_options=dict(actor.policy_loss),
        observations=actor.observation_coeff != 0,
        by_prompt=actor.loss_agg_mode == "prompt-mean",
        critic=config.needs_critic,
        by_agent=algorithm.credit == "agent",
    )


def objective_settings(config: RunConfig) -> ObjectiveSettings:
    """Return what the policy's loss is made of."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    reinforce = correction.bypass_mode and correction.loss_type == "reinforce"
    in_loss = correction.bypass_mode and (reinforce or correction.rollout_rs)
    in_loss = in_loss or (config.on_policy and config.rollout_is is not None)
    bounds = correction.model_dump(include=CORRECTION)
    weighted = config.rollout_is is not None or correction.m2_threshold is not None
    loss_mode = "gpg" if reinforce else absolute(actor.policy_loss.loss_mode)  # -A log pi, weighted
    return ObjectiveSettings(
        actor.replaced(
            policy_loss=actor.policy_loss.replaced(loss_mode=loss_mode),
            kl_loss_type=absolute(actor.kl_loss_type),
            loss_scale_factor=actor.loss_scale_factor or config.data.max_response_length,
        ),
        weighted=weighted and not (correction.bypass_mode or config.on_policy),
        selects_tokens=actor.policy_loss.loss_mode in TOKEN_SELECTING_LOSSES,
        correction={"rollout_is": config.rollout_is, **bounds} if in_loss else None,
        off_policy_threshold=correction.off_policy_mask_threshold,
        by_top_tokens=config.teacher_is_elsewhere,
        teaches_itself=config.algorithm.self_distillation.enable,
        on_policy=config.on_policy,
    )


def value_settings(config: RunConfig) -> ValueSettings:
    """Return what the critic's loss is made of."""
    longest = config.actor_rollout_ref.actor.loss_scale_factor or config.data.max_response_length
    return ValueSettings(config.critic, longest)
