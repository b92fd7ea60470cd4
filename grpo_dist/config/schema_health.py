"""The section `trainer.health`: what a run's metrics must not do, and what happens if they do."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_dist.config.field_types import Count, Float, NonNegativeFloat, PositiveFloat, PositiveShare, Section, Share


class HealthRuleConfig(Section):
    """A rule: what to do when it is broken."""

    action: Literal["warn", "stop", "off"]


class ThresholdConfig(HealthRuleConfig):
    """A rule on a number that must not be larger."""

    threshold: NonNegativeFloat
    steps: Count


class ShareConfig(HealthRuleConfig):
    """A rule on a share that must not be larger."""

    threshold: Share
    steps: Count


class GradNormConfig(HealthRuleConfig):
    """`trainer.health.grad_norm`."""

    factor: Annotated[Float, Field(gt=1)]
    window: Annotated[int, Field(ge=2)]
    floor: NonNegativeFloat
    threshold: PositiveFloat | None
    steps: Count


class EntropyConfig(HealthRuleConfig):
    """`trainer.health.entropy`."""

    share_of_start: Share
    floor: NonNegativeFloat
    steps: Count


class NoRewardConfig(HealthRuleConfig):
    """`trainer.health.no_reward`."""

    threshold: Float
    steps: Count


class HealthConfig(Section):
    """`trainer.health`: one section for each rule of trainer/health_rules.py, under its name."""

    repeat_every: Count
    solved: PositiveShare
    kl: ThresholdConfig
    ppo_kl: ThresholdConfig
    grad_norm: GradNormConfig
    entropy: EntropyConfig
    zero_variance: ShareConfig
    truncation: ShareConfig
    rollout_mismatch: ShareConfig
    reward_failures: ShareConfig
    no_reward: NoRewardConfig
    non_finite: HealthRuleConfig
