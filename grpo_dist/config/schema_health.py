"""The section `trainer.health`: a table of rules that check each step's metrics.

A row has the metric, the settings with their defaults, the condition, and the parts of the message. A config sets only
what it changes (`trainer.health.kl.threshold=0.5`). trainer/health.py finds the numbers that conditions and messages
name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, create_model

from grpo_dist.config.field_types import Count, Float, NonNegativeFloat, PositiveFloat, PositiveShare, Section, Share

Numbers = Mapping[str, Any]
Action = Literal["warn", "stop", "off"]
SCORE = "critic/score/mean"


@dataclass(frozen=True)
class HealthRule:
    """A row. Condition and message get the rule's settings, `metric`, `value`, and what all steps so far come to.

    Attributes:
        metrics: names of the metric; the first one that a step has is checked. (): the rule checks all metrics.
        settings: (type, default) of the settings; `action` is taken once the rule is broken in `steps` steps in a row.
        seen: what was observed: a format string.
        cause: the most likely cause.
        advice: what to do.
        broken: the condition, which must hold of no number that is nan.
        needs: other metrics without which the rule cannot be checked.
        solved: (cause, advice) that replace the others if the task is solved.
        hopeless: (cause, advice) that replace the others if nearly all responses get the lowest score.
    """

    metrics: tuple[str, ...]
    settings: Mapping[str, tuple[Any, Any]]
    seen: str
    cause: str
    advice: str
    broken: Callable[[Numbers], bool] = lambda n: n["value"] > n["threshold"]
    needs: tuple[str, ...] = ()
    solved: tuple[str, str] | None = None
    hopeless: tuple[str, str] | None = None


RULES = {
    "kl": HealthRule(
        ("actor/kl_loss", "actor/reward_kl_penalty"),
        {"steps": (Count, 3), "threshold": (NonNegativeFloat, 1.0)},
        "{metric} is {value:.3g} nats per token, above {threshold:g}",
        "the policy drifts from the reference: the learning rate is too high, or the KL coefficient too low",
        "lower actor.optim.lr, or raise actor.kl_loss_coef (algorithm.kl_ctrl.kl_coef); read rollouts/ for broken text",
    ),
    "ppo_kl": HealthRule(
        ("actor/ppo_kl",),
        {"steps": (Count, 3), "threshold": (NonNegativeFloat, 0.1)},
        "{metric} is {value:.3g} nats per token, outside +-{threshold:g}",
        "the optimizer steps on one batch move the policy too far from the one before the update",
        "lower actor.optim.lr or actor.ppo_epochs, or raise actor.ppo_mini_batch_size (fewer steps for each batch)",
        broken=lambda n: abs(n["value"]) > n["threshold"],
    ),
    # Above `factor` times the median of the last `window` steps, once half of the window is filled, or above the
    # threshold. Norms up to `floor` never break the median's limit: the median is near 0 with nothing to learn.
    "grad_norm": HealthRule(
        ("actor/grad_norm",),
        {
            "factor": (Float, Field(10.0, gt=1)),
            "window": (int, Field(20, ge=2)),
            "floor": (NonNegativeFloat, 1.0),
            "threshold": (PositiveFloat | None, None),
        },
        "{metric} is {value:.3g}, above {limits_passed}",
        "a batch of outliers (very long responses, huge rewards, old samples), or a policy that diverges",
        "if it continues: lower actor.optim.lr or actor.grad_clip; look at critic/rewards/* and rollouts/ of this step",
        broken=lambda n: bool(n["limits_passed"]),
    ),
    # Below a share of the mean of the first steps, or below `floor` (nats). Exact, or estimated from sampled tokens.
    "entropy": HealthRule(
        ("actor/entropy", "rollout_corr/rollout_log_ppl"),
        {"steps": (Count, 3), "share_of_start": (Share, 0.1), "floor": (NonNegativeFloat, 0.001)},
        "{metric} is {value:.3g} nats per token, below {least_entropy:.3g}; it began at {start:.3g}, and the mean "
        "score {score:.3g} is not the best one",
        "entropy collapse: the responses to a prompt are all alike before the task is solved, so nothing new is "
        "explored",
        "raise actor.clip_ratio_high (0.28), actor.entropy_coeff or rollout.temperature, or lower actor.optim.lr",
        broken=lambda n: n["started"] and n["value"] < n["least_entropy"] and n["progress"] < n["solved"],
        needs=(SCORE,),
    ),
    "zero_variance": HealthRule(
        ("critic/zero_variance_groups",),
        {"steps": (Count, 5), "threshold": (Share, 0.9)},
        "in {value:.0%} of the groups all responses score the same, more than {threshold:.0%}; the mean score is "
        "{score:.3g}",
        "some prompts are always solved and the others never",
        "filter the prompts by difficulty, raise rollout.n, or sample until groups differ (filter_groups)",
        needs=(SCORE,),
        solved=(
            "the prompts have become too easy: nearly all responses get the best score",
            "nothing is wrong if this was the goal; stop here, or train on harder prompts",
        ),
        hopeless=(
            "nearly all responses get the lowest score: the prompts are too hard, or the reward cannot parse them",
            "use easier prompts or a stronger model, raise rollout.n, or reward partial success",
        ),
    ),
    "truncation": HealthRule(
        ("response_length/clip_ratio",),
        {"steps": (Count, 5), "threshold": (Share, 0.3)},
        "{value:.0%} of the responses were cut off at data.max_response_length, more than {threshold:.0%}",
        "responses need more room, or the policy rambles or does not know how to end one (chat template, stop)",
        "raise data.max_response_length, or set reward.overlong_buffer.enable or algorithm.mask_truncated_responses",
    ),
    "rollout_mismatch": HealthRule(
        ("training/rollout_probs_diff_mean",),
        {"steps": (Count, 3), "threshold": (Share, 0.05)},
        "{metric} is {value:.3g}, above {threshold:g}: engine and trainer disagree about the same tokens",
        "top_p, top_k or min_p truncate the distribution, dtypes differ (rollout.dtype, actor.fsdp_config.dtype), the "
        "engine holds other weights than the policy, or responses are old (trainer.max_staleness)",
        "remove the cause; algorithm.rollout_correction.rollout_is=token corrects for the rest",
    ),
    # On the first batch alone, before the update. `of_limit` is 1 at what rounding explains.
    "agreement": HealthRule(
        ("training/agreement/of_limit",),
        {"action": (Action, "stop"), "steps": (Literal[1], 1), "threshold": (PositiveFloat, 1.0)},
        "{agreement}",
        "the engine has other weights than the trainer, or one of both computes this architecture wrongly",
        "{command} names the first operation that differs; if that is meant to be, raise threshold or set action=warn",
    ),
    "reward_failures": HealthRule(
        ("reward/failure_rate",),
        {"threshold": (Share, 0.005)},
        "the reward function failed on {value:.2%} of the responses, more than {threshold:.2%}",
        "it raises on unusual text, is too slow for reward.timeout_s, or a service behind it does not answer",
        "the message about failed responses shows the first one, and rollouts/ all of them; they train nothing, unless "
        "reward.failure_score is set",
    ),
    # While all scores of the run are equal and not above the threshold.
    "no_reward": HealthRule(
        ("critic/score/max",),
        {"steps": (Count, 10), "threshold": (Float, 0.0)},
        "every response since the start of this run scored {highest:g}",
        "the reward function does not find the answers (format, parsing, ground_truth), or the task is too hard",
        "read a few responses in rollouts/, and score one by hand; describe the answer format in the prompt, or reward "
        "it",
        broken=lambda n: n["lowest"] == n["highest"] <= n["threshold"],
    ),
    "non_finite": HealthRule(
        (),
        {},
        "{not_finite} not finite",
        "a reward function that returned nan, a division by 0, or log-probs that overflow",
        "look up in docs/metrics.md how the metric is computed; do not trust the step that it came from",
        broken=lambda n: bool(n["not_finite"]),
    ),
}


class HealthRuleConfig(Section):
    """Settings of every rule."""

    action: Action = "warn"
    steps: Count = 1


def _section(name: str) -> tuple[type[HealthRuleConfig], HealthRuleConfig]:
    settings: dict[str, Any] = dict(RULES[name].settings)
    section = create_model(name, __base__=HealthRuleConfig, **settings)
    return section, section()


_SECTIONS: dict[str, Any] = {
    "repeat_every": (Count, ...),
    "solved": (PositiveShare, ...),
    **{name: _section(name) for name in RULES},
}


class HealthConfig(create_model("Sections", __base__=Section, **_SECTIONS)):  # type: ignore[misc]
    """`trainer.health`: two settings that apply to all rules, and a section for each rule."""


def rule_defaults(rule: str) -> dict[str, Any]:
    """Return the default settings of a rule."""
    section: HealthRuleConfig = HealthConfig.model_fields[rule].default
    return section.model_dump()
