"""From the config's sections to what advantages and the policy's loss are made of. Imports neither Ray nor vLLM."""

from __future__ import annotations

from grpo_dist.algorithms.settings import ObjectiveSettings
from grpo_dist.algorithms.targets import TargetSettings
from grpo_dist.config.schema import RunConfig
from grpo_dist.plugins.names import TOKEN_SELECTING_LOSSES, absolute


def target_settings(config: RunConfig) -> TargetSettings:
    """Return what advantages, corrections and targets are computed with, before the loss."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    correction = algorithm.rollout_correction
    options = {"norm_adv_by_std_in_grpo", "gamma", "lam", "f_norm", "gdpo_reward_keys", "gdpo_reward_weights"}
    return TargetSettings(
        adv_estimator=absolute(algorithm.adv_estimator),
        options=algorithm.model_dump(include=options),
        kl_penalty=absolute(algorithm.kl_penalty) if algorithm.use_kl_in_reward else None,
        rollout_correction=correction.model_dump(exclude={"bypass_mode", "loss_type"})
        | {"rollout_is": config.rollout_is},
        old_log_probs_from=config.old_log_probs_from,
        mask_truncated=algorithm.mask_truncated_responses,
        top_entropy_quantile=actor.top_entropy_quantile,
        loss_mode=absolute(actor.policy_loss.loss_mode),
        loss_options=actor.policy_loss.model_dump(exclude={"loss_mode"}),
        critic=config.needs_critic,
    )


def objective_settings(config: RunConfig) -> ObjectiveSettings:
    """Return what the policy's loss is made of."""
    actor = config.actor_rollout_ref.actor
    loss = actor.policy_loss
    clips = {"clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg"}
    correction = config.algorithm.rollout_correction
    reinforce = correction.bypass_mode and correction.loss_type == "reinforce"
    in_loss = correction.bypass_mode and (reinforce or correction.rollout_rs)
    in_loss = in_loss or (config.on_policy and config.rollout_is is not None)
    bounds = correction.model_dump(include={"rollout_is_threshold", "rollout_rs", "rollout_rs_threshold"})
    return ObjectiveSettings(
        loss_mode="gpg" if reinforce else absolute(loss.loss_mode),  # -A log pi, weighted
        loss_agg_mode=actor.loss_agg_mode,
        options=loss.model_dump(exclude={"loss_mode"}) | actor.model_dump(include=clips),
        use_kl_loss=actor.use_kl_loss,
        kl_loss_type=absolute(actor.kl_loss_type),
        kl_loss_coef=actor.kl_loss_coef,
        entropy_coeff=actor.entropy_coeff,
        loss_scale_factor=actor.loss_scale_factor or config.data.max_response_length,
        weighted=config.rollout_is is not None and not (correction.bypass_mode or config.on_policy),
        selects_tokens=loss.loss_mode in TOKEN_SELECTING_LOSSES,
        on_policy=config.on_policy,
        correction={"rollout_is": config.rollout_is, **bounds} if in_loss else None,
    )
