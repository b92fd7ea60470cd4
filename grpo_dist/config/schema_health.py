"""The section `trainer.health`: the rules that check each step's metrics, one field of `HealthConfig` per rule.

A field has the rule's name, its metric, the parts of its message, and its settings with their defaults. A config sets
only what it changes (`trainer.health.kl.threshold=0.5`). trainer/health.py evaluates the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_dist.config.field_types import Count, Float, NonNegativeFloat, PositiveFloat, PositiveShare, Section, Share

_SCORE = "critic/score/mean"


@dataclass(frozen=True, kw_only=True)
class HealthRule:
    """The metric that a rule checks, and the parts of its message.

    Attributes:
        metrics: names of the metric; the first one that a step has is checked. (): the rule checks all metrics.
        needs: other metrics without which the rule cannot be checked.
        both_signs: whether the threshold applies to the absolute value.
        seen: what was observed: a format string for the metric's name, its value, the limit and other numbers.
        cause: the most likely cause.
        advice: what to do.
        solved: (cause, advice) that replace the others if the task is solved.
        hopeless: (cause, advice) that replace the others if nearly all responses get the lowest score.
    """

    metrics: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    both_signs: bool = False
    seen: str
    cause: str
    advice: str
    solved: tuple[str, str] | None = None
    hopeless: tuple[str, str] | None = None


class RuleConfig(Section):
    """Settings of every rule: `action` is taken once the rule is broken in `steps` steps in a row."""

    action: Literal["warn", "stop", "off"] = "warn"
    steps: Count = 1


class ThresholdConfig(RuleConfig):
    """A rule on a number that must not exceed the threshold."""

    threshold: NonNegativeFloat


class ShareConfig(RuleConfig):
    """A rule on a share, in [0, 1], that must not exceed the threshold."""

    threshold: Share


class GradNormConfig(RuleConfig):
    """`trainer.health.grad_norm`: broken above `factor` times the median of the last `window` steps, or `threshold`.

    The median is used once half of the window is filled. Norms up to `floor` never break the median's limit, since the
    median is near 0 when there is nothing to learn.
    """

    factor: Annotated[Float, Field(gt=1)]
    window: Annotated[int, Field(ge=2)]
    floor: NonNegativeFloat
    threshold: PositiveFloat | None


class EntropyConfig(RuleConfig):
    """`trainer.health.entropy`: broken below a share of the mean of the first steps, or below `floor` (nats)."""

    share_of_start: Share
    floor: NonNegativeFloat


class NoRewardConfig(RuleConfig):
    """`trainer.health.no_reward`: broken while all scores of the run are equal and not above the threshold."""

    threshold: Float


class HealthConfig(Section):
    """`trainer.health`: the rules, and two settings that apply to all of them."""

    repeat_every: Count
    solved: PositiveShare

    kl: Annotated[
        ThresholdConfig,
        HealthRule(
            metrics=("actor/kl_loss", "actor/reward_kl_penalty"),
            seen="{metric} is {value:.3g} nats per token, above {limit:g}",
            cause="the policy drifts from the reference: the learning rate is too high, or the KL coefficient too low",
            advice="lower actor.optim.lr, or raise actor.kl_loss_coef (algorithm.kl_ctrl.kl_coef); read rollouts/ for "
            "broken text",
        ),
    ] = ThresholdConfig(threshold=1.0, steps=3)

    ppo_kl: Annotated[
        ThresholdConfig,
        HealthRule(
            metrics=("actor/ppo_kl",),
            both_signs=True,
            seen="{metric} is {value:.3g} nats per token, outside +-{limit:g}",
            cause="the optimizer steps on one batch move the policy too far from the one before the update",
            advice="lower actor.optim.lr or actor.ppo_epochs, or raise actor.ppo_mini_batch_size (fewer steps for each "
            "batch)",
        ),
    ] = ThresholdConfig(threshold=0.1, steps=3)

    grad_norm: Annotated[
        GradNormConfig,
        HealthRule(
            metrics=("actor/grad_norm",),
            seen="{metric} is {value:.3g}, above {limits}",
            cause="a batch of outliers (very long responses, huge rewards, old samples), or a policy that diverges",
            advice="if it continues: lower actor.optim.lr or actor.grad_clip; look at critic/rewards/* and rollouts/ "
            "of this step",
        ),
    ] = GradNormConfig(factor=10.0, window=20, floor=1.0, threshold=None)

    entropy: Annotated[
        EntropyConfig,
        HealthRule(
            metrics=("actor/entropy", "rollout_corr/rollout_log_ppl"),  # exact; estimated from the sampled tokens
            needs=(_SCORE,),
            seen="{metric} is {value:.3g} nats per token, below {limit:.3g}; it began at {start:.3g}, and the mean "
            "score {score:.3g} is not the best one",
            cause="entropy collapse: the responses to a prompt are all alike before the task is solved, so nothing new "
            "is explored",
            advice="raise actor.clip_ratio_high (0.28), actor.entropy_coeff or rollout.temperature, or lower "
            "actor.optim.lr",
        ),
    ] = EntropyConfig(share_of_start=0.1, floor=0.001, steps=3)

    zero_variance: Annotated[
        ShareConfig,
        HealthRule(
            metrics=("critic/zero_variance_groups",),
            needs=(_SCORE,),
            seen="in {value:.0%} of the groups all responses score the same, more than {limit:.0%}; the mean score is "
            "{score:.3g}",
            cause="some prompts are always solved and the others never",
            advice="filter the prompts by difficulty, raise rollout.n, or sample until groups differ (filter_groups)",
            solved=(
                "the prompts have become too easy: nearly all responses get the best score",
                "nothing is wrong if this was the goal; stop here, or train on harder prompts",
            ),
            hopeless=(
                "nearly all responses get the lowest score: the prompts are too hard, or the reward cannot parse them",
                "use easier prompts or a stronger model, raise rollout.n, or reward partial success",
            ),
        ),
    ] = ShareConfig(threshold=0.9, steps=5)

    truncation: Annotated[
        ShareConfig,
        HealthRule(
            metrics=("response_length/clip_ratio",),
            seen="{value:.0%} of the responses were cut off at data.max_response_length, more than {limit:.0%}",
            cause="responses need more room, or the policy rambles or does not know how to end one (chat template, "
            "stop)",
            advice="raise data.max_response_length, or set reward.overlong_buffer.enable or "
            "algorithm.mask_truncated_responses",
        ),
    ] = ShareConfig(threshold=0.3, steps=5)

    rollout_mismatch: Annotated[
        ShareConfig,
        HealthRule(
            metrics=("training/rollout_probs_diff_mean",),
            seen="{metric} is {value:.3g}, above {limit:g}: engine and trainer disagree about the same tokens",
            cause="top_p, top_k or min_p truncate the distribution, dtypes differ (rollout.dtype, "
            "actor.fsdp_config.dtype), the engine holds other weights than the policy, or responses are old "
            "(trainer.max_staleness)",
            advice="remove the cause; algorithm.rollout_correction.rollout_is=token corrects for the rest",
        ),
    ] = ShareConfig(threshold=0.05, steps=3)

    reward_failures: Annotated[
        ShareConfig,
        HealthRule(
            metrics=("reward/failure_rate",),
            seen="the reward function failed on {value:.2%} of the responses, more than {limit:.2%}",
            cause="it raises on unusual text, is too slow for reward.timeout_s, or a service behind it does not answer",
            advice="the message about failed responses shows the first one, and rollouts/ all of them; they train "
            "nothing, unless reward.failure_score is set",
        ),
    ] = ShareConfig(threshold=0.005)

    no_reward: Annotated[
        NoRewardConfig,
        HealthRule(
            metrics=("critic/score/max",),
            seen="every response since the start of this run scored {highest:g}",
            cause="the reward function does not find the answers (format, parsing, ground_truth), or the task is too "
            "hard",
            advice="read a few responses in rollouts/, and score one by hand; describe the answer format in the "
            "prompt, or reward it",
        ),
    ] = NoRewardConfig(threshold=0.0, steps=10)

    non_finite: Annotated[
        RuleConfig,
        HealthRule(
            seen="{names} not finite",
            cause="a reward function that returned nan, a division by 0, or log-probs that overflow",
            advice="look up in docs/metrics.md how the metric is computed; do not trust the step that it came from",
        ),
    ] = RuleConfig()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Fill in the defaults of a rule of which the config sets only some keys."""
        if not isinstance(given, dict):
            return given
        rows = {name: value for name, value in given.items() if name in RULES and isinstance(value, dict)}
        return given | {name: rule_defaults(name) | value for name, value in rows.items()}


RULES: dict[str, HealthRule] = {
    name: part
    for name, field in HealthConfig.model_fields.items()
    for part in field.metadata
    if isinstance(part, HealthRule)
}


def rule_defaults(rule: str) -> dict[str, Any]:
    """The default settings of a rule."""
    default: RuleConfig = HealthConfig.model_fields[rule].default
    return default.model_dump()
