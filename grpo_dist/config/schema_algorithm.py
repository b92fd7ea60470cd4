"""The sections `algorithm` and `actor_rollout_ref.actor.policy_loss`: see schema.py."""

from __future__ import annotations

from typing import Annotated, Literal

from grpo_dist.config.field_types import (
    Count,
    Distinct,
    Float,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    Pair,
    PositiveFloat,
    Resume,
    Section,
    Share,
    Text,
    builtin_or_custom,
)
from grpo_dist.plugins.names import ADV_ESTIMATORS, LOSS_MODES, SAMPLED_KL_TYPES


class KLCtrlConfig(Section):
    """`algorithm.kl_ctrl`: the coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"]
    kl_coef: NonNegativeFloat
    target_kl: PositiveFloat
    horizon: PositiveFloat


class RolloutCorrectionConfig(Section):
    """`algorithm.rollout_correction`: the sampler is not quite the policy that trains."""

    rollout_is: Literal["auto", "token", "sequence"] | None
    rollout_is_threshold: PositiveFloat | Text
    rollout_is_batch_normalize: bool
    rollout_rs: Text | None
    rollout_rs_threshold: PositiveFloat | Text | None
    m2_threshold: PositiveFloat | None
    off_policy_mask_threshold: PositiveFloat | None
    bypass_mode: bool
    loss_type: Literal["ppo_clip", "reinforce"]


class FilterGroupsConfig(Section):
    """`algorithm.filter_groups`: DAPO's dynamic sampling."""

    enable: bool
    metric: Text
    max_num_gen_batches: Annotated[NonNegativeInt, Resume.FREE]


TEXT = "{text}"  # in a template of `SelfDistillationConfig`: where the text is put


class SelfDistillationConfig(Section):
    """`algorithm.self_distillation`: what the reference is shown before the responses it teaches on."""

    enable: bool
    success_threshold: Float | None
    success_template: Text
    feedback_name: Text | None
    feedback_template: Text
    longest_prompt: Count | None


class TeacherEndpointConfig(Section):
    """`actor_rollout_ref.ref.model.endpoint`: a teacher that a server of its own runs."""

    base_url: Annotated[Text | None, Resume.FREE]
    model: Text | None
    top_k: Count
    timeout_s: Annotated[PositiveFloat, Resume.FREE]
    headers_env: Annotated[Text | None, Resume.FREE]


class AlgorithmConfig(Section):
    """`algorithm`: how rewards become advantages."""

    adv_estimator: Annotated[str, builtin_or_custom(ADV_ESTIMATORS)]
    norm_adv_by_std_in_grpo: bool
    gamma: Share
    lam: Share
    f_norm: PositiveFloat
    zvp_alpha: NonNegativeFloat
    step_advantage_w: NonNegativeFloat
    rae_decay: Share
    a2po_beta: PositiveFloat
    gdpo_reward_keys: Annotated[Annotated[tuple[Text, ...], Names] | None, Distinct]
    gdpo_reward_weights: Annotated[tuple[Float, ...], Pair] | None
    use_kl_in_reward: bool
    kl_penalty: Annotated[str, builtin_or_custom(SAMPLED_KL_TYPES)]
    kl_ctrl: KLCtrlConfig
    rollout_correction: RolloutCorrectionConfig
    filter_groups: FilterGroupsConfig
    self_distillation: SelfDistillationConfig
    mask_truncated_responses: bool
    mask_equal_groups: bool
    min_group_size: Count | None
    credit: Literal["episode", "agent"]


class PolicyLossConfig(Section):
    """`actor_rollout_ref.actor.policy_loss`: which loss, and options that only some of them read."""

    loss_mode: Annotated[str, builtin_or_custom(LOSS_MODES)]
    clip_cov_ratio: Share
    clip_cov_lb: Float
    clip_cov_ub: Float
    kl_cov_ratio: Share
    ppo_kl_coef: NonNegativeFloat
    dro_beta: NonNegativeFloat
    vespo_k_pos: PositiveFloat
    vespo_lambda_pos: PositiveFloat
    vespo_k_neg: PositiveFloat
    vespo_lambda_neg: PositiveFloat
