"""The section `trainer.health`: the rules that each step's metrics are held against, one row for each rule.

A row is a field of `HealthConfig`: the rule's name, the metric that it looks at, what its message says, and its
settings with their defaults. A config names only what it changes (`trainer.health.kl.threshold=0.5`); the row gives
the rest. How the rules are judged is in trainer/health.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_dist.config.field_types import Count, Float, NonNegativeFloat, PositiveFloat, PositiveShare, Section, Share

_SCORE = "critic/score/mean"


@dataclass(frozen=True, kw_only=True)
class HealthRule:
    """What a rule looks at, and what its message says.

    Attributes:
        metrics: names of the metric; the first one that a step has is judged. (): the rule looks at all metrics.
        needs: metrics that the rule cannot be judged without.
        both_signs: whether the threshold holds for the metric without its sign.
        seen: what was seen, with places for the metric's name, its value, the limit and other numbers.
        cause: what that most likely comes from.
        advice: what to do.
        solved: cause and advice where the task is solved instead.
        hopeless: cause and advice where nearly all responses earn the lowest score instead.
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
    """The settings of a rule: what happens once it is broken in so many steps in a row."""

    action: Literal["warn", "stop", "off"] = "warn"
    steps: Count = 1


class ThresholdConfig(RuleConfig):
    """A rule on a number that must not be larger than the threshold."""

    threshold: NonNegativeFloat


class ShareConfig(RuleConfig):
    """A rule on a share that must not be larger than the threshold."""

    threshold: Share


class GradNormConfig(RuleConfig):
    """`trainer.health.grad_norm`: broken above `factor` times the median of the last `window` steps, or `threshold`.

    The median counts once half of the window is there. Norms up to `floor` are never too large by the median, which is
    near 0 where there is nothing to learn.
    """

    factor: Annotated[Float, Field(gt=1)]
    window: Annotated[int, Field(ge=2)]
    floor: NonNegativeFloat
    threshold: PositiveFloat | None


class EntropyConfig(RuleConfig):
    """`trainer.health.entropy`: broken below a share of the mean over the first steps, and below `floor` in nats."""

    share_of_start: Share
    floor: NonNegativeFloat


class NoRewardConfig(RuleConfig):
    """`trainer.health.no_reward`: broken where no score has ever been above the threshold, or unlike the others."""

    threshold: Float


class HealthConfig(Section):
    """`trainer.health`: the table of the rules, and two settings for all of them."""

    repeat_every: Count
    solved: PositiveShare

    kl: Annotated[
        ThresholdConfig,
        HealthRule(
            metrics=("actor/kl_loss", "actor/reward_kl_penalty"),
            seen="{metric} is {value:.3g} nats per token, above {limit:g}",
            cause="the policy runs away from the reference: its steps are too large, or the KL weighs too little",
            advice="lower actor.optim.lr, or raise actor.kl_loss_coef (algorithm.kl_ctrl.kl_coef); read rollouts/ for "
            "broken text",
        ),
    ] = ThresholdConfig(threshold=1.0, steps=3)

    ppo_kl: Annotated[
        ThresholdConfig,
        HealthRule(
            metrics=("actor/ppo_kl",),
            both_signs=True,
            seen="{metric} is {value:.3g} nats per token, beyond +-{limit:g}",
            cause="the optimizer steps on one batch carry the policy far from the one that the batch was judged by",
            advice="lower actor.optim.lr or actor.ppo_epochs, or raise actor.ppo_mini_batch_size (fewer steps for each "
            "batch)",
        ),
    ] = ThresholdConfig(threshold=0.1, steps=3)

    grad_norm: Annotated[
        GradNormConfig,
        HealthRule(
            metrics=("actor/grad_norm",),
            seen="{metric} is {value:.3g}, above {limits}",
            cause="a batch of outliers (very long responses, huge rewards, old samples), or a policy that comes apart",
            advice="if it goes on: lower actor.optim.lr or actor.grad_clip; look at critic/rewards/* and rollouts/ of "
            "this step",
        ),
    ] = GradNormConfig(factor=10.0, window=20, floor=1.0, threshold=None)

    entropy: Annotated[
        EntropyConfig,
        HealthRule(
            metrics=("actor/entropy", "rollout_corr/rollout_log_ppl"),  # exact; estimated from the sampled tokens
            needs=(_SCORE,),
            seen="{metric} is {value:.3g} nats per token, below {limit:.3g}; it began at {start:.3g}, and the mean "
            "score {score:.3g} is not the best one",
            cause="the policy is sure of itself before the task is solved: all responses are alike, and nothing new is "
            "found",
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
                "the prompts are too easy by now: nearly all responses earn the best score",
                "nothing is wrong if this is the goal; to go on, train on harder prompts, or stop here",
            ),
            hopeless=(
                "the prompts are too hard: nearly all responses earn the lowest score (or the reward cannot read them)",
                "take easier prompts or a stronger model, raise rollout.n, or give part of the reward for part of the "
                "work",
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
            cause="top_p, top_k or min_p cut the distribution, types differ (rollout.dtype, actor.fsdp_config.dtype), "
            "the engine holds other weights than the policy, or responses are old (trainer.max_staleness)",
            advice="mend what differs; algorithm.rollout_correction.rollout_is=token weighs what is left",
        ),
    ] = ShareConfig(threshold=0.05, steps=3)

    reward_failures: Annotated[
        ShareConfig,
        HealthRule(
            metrics=("reward/failure_rate",),
            seen="the reward function failed on {value:.2%} of the responses, more than {limit:.2%}",
            cause="it raises on unusual text, is too slow for reward.timeout_s, or a service behind it does not answer",
            advice="the message about unscored responses shows the first one; these responses train with "
            "reward.failure_score",
        ),
    ] = ShareConfig(threshold=0.005)

    no_reward: Annotated[
        NoRewardConfig,
        HealthRule(
            metrics=("critic/score/max",),
            seen="every response since the start of this run scored {highest:g}",
            cause="the reward function does not find the answers (format, parsing, ground_truth), or the task is out "
            "of reach",
            advice="read a few responses in rollouts/, and score one by hand; show the format in the prompt, or reward "
            "it",
        ),
    ] = NoRewardConfig(threshold=0.0, steps=10)

    non_finite: Annotated[
        RuleConfig,
        HealthRule(
            seen="{names} not finite",
            cause="a reward function that returned nan, a division by 0, or log-probs that overflow",
            advice="find the metric in docs/metrics.md, and what makes it; do not trust the step that it came from",
        ),
    ] = RuleConfig()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Give a rule of which only some settings are named the others from its row."""
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
    """The settings of a rule where the config does not change them."""
    default: RuleConfig = HealthConfig.model_fields[rule].default
    return default.model_dump()
