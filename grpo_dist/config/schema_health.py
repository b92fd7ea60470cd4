"""The section `trainer.health`: a table of rules, and the check of each step's metrics against them.

    rule broken for `steps` steps in a row -> metric health/RULE = 1, and a message (warn) or HealthError (stop)

A row has the metric, the settings with their defaults, the condition, and the parts of the message. A config sets only
what it changes (`trainer.health.kl.threshold=0.5`). A step without a rule's metric resets its count of steps in a row.
A resumed run starts with empty windows.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from pydantic import Field, create_model

from grpo_dist.config.field_types import Count, Float, NonNegativeFloat, PositiveFloat, PositiveShare, Section, Share
from grpo_dist.errors import HealthError

Numbers = Mapping[str, Any]
Metrics = Mapping[str, float]
Action = Literal["warn", "stop", "off"]
SCORE = "critic/score/mean"
START_STEPS = 5  # the entropy of one batch is a noisy start value
MOST_NAMED = 5


@dataclass(frozen=True)
class HealthRule:
    """A row. Condition and message get the rule's settings, `metric`, `value`, and what all steps so far come to.

    Attributes:
        metrics: names of the metric; the first one that a step has is checked. (): the rule checks all metrics.
        settings: (type, default) of the settings; `action` is taken once the rule is broken in `steps` steps in a row.
        seen: what was observed: a format string.
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
        "engine holds other weights than the policy, or responses are old (staleness/max)",
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


_OF_ALL: dict[str, Any] = {"repeat_every": (Count, ...), "solved": (PositiveShare, ...)}
_SECTIONS = _OF_ALL | {name: _section(name) for name in RULES}


class HealthConfig(create_model("Sections", __base__=Section, **_SECTIONS)):  # type: ignore[misc]
    """`trainer.health`: two settings that apply to all rules, and a section for each rule."""


def rule_defaults(rule: str) -> dict[str, Any]:
    """Return the default settings of a rule."""
    section: HealthRuleConfig = HealthConfig.model_fields[rule].default
    return section.model_dump()


@dataclass(frozen=True)
class Judgement:
    """The result of checking one step.

    Attributes:
        metrics: `health/RULE`, 1 if the rule is broken, else 0; rules without their metric are left out.
        warnings: messages of broken rules with action=warn.
        faults: messages of broken rules with action=stop.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def tell(self, show: Callable[[str], None], checkpoint: Path | None) -> None:
        """Show the warnings, and raise a HealthError if there are faults; `checkpoint` is the run's last one."""
        for warning in self.warnings:
            show(warning)
        if self.faults:
            go_on = f"the last checkpoint is {checkpoint}; the same command resumes from it"
            none = "there is no checkpoint to resume from (trainer.save_freq)"
            raise HealthError("\n".join([*self.faults, go_on if checkpoint else none]))


class HealthMonitor:
    """Checks the steps of a run, in order.

    Attributes:
        grad_norms: gradient norms of the last `window` steps and the current one.
        first_entropies: entropies of the first `START_STEPS` steps, nats.
        texts: parts of messages, by name, that no number of the steps gives.
        lowest, highest: scores of a response so far.
    """

    def __init__(self, config: HealthConfig) -> None:
        self.config = config
        self.grad_norms: deque[float] = deque(maxlen=config.grad_norm.window + 1)
        self.first_entropies: list[float] = []
        self.texts = {"agreement": "", "command": "grpo-dist agreement"}
        self.lowest, self.highest = math.inf, -math.inf
        self._in_a_row: Counter[str] = Counter()
        self._last_warned: dict[str, int] = {}

    def judge(self, metrics: Metrics, step: int) -> Judgement:
        """Check a step's metrics against all rules."""
        self._add(metrics)
        so_far, judgement = self._so_far(metrics), Judgement()
        for name, rule in RULES.items():
            settings = getattr(self.config, name)
            metric = _first(metrics, rule.metrics)
            unknown = (rule.metrics and metric is None) or not metrics.keys() >= set(rule.needs)
            if settings.action == "off" or unknown:
                self._in_a_row[name] = 0
                continue
            numbers = so_far | settings.model_dump() | {"metric": metric, "value": metrics[metric] if metric else None}
            self._in_a_row[name] = self._in_a_row[name] + 1 if rule.broken(numbers) else 0
            broken = self._in_a_row[name] >= settings.steps
            judgement.metrics[f"health/{name}"] = float(broken)
            if broken and settings.action == "stop":
                judgement.faults.append(self._text(name, numbers, step))
            elif broken and step - self._last_warned.get(name, -math.inf) >= self.config.repeat_every:
                self._last_warned[name] = step
                judgement.warnings.append(self._text(name, numbers, step))
        return judgement

    def _text(self, name: str, numbers: dict[str, Any], step: int) -> str:
        rule, progress = RULES[name], numbers["progress"]
        cause, advice = rule.cause, rule.advice
        if rule.solved is not None and progress >= self.config.solved:
            cause, advice = rule.solved
        elif rule.hopeless is not None and 1 - progress >= self.config.solved:
            cause, advice = rule.hopeless
        count = self._in_a_row[name]
        since = f", for {count} steps" if count > 1 else ""
        seen, tried = rule.seen.format_map(numbers), advice.format_map(numbers)
        found = f"health/{name} at step {step}{since}: {seen}"
        return "\n  ".join([found, f"likely: {cause}", f"try: {tried}", f"(trainer.health.{name})"])

    def _add(self, metrics: Metrics) -> None:
        """Add a step to the windows. Non-finite metrics are ignored."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if "actor/grad_norm" in finite:
            self.grad_norms.append(finite["actor/grad_norm"])
        entropy = _first(finite, RULES["entropy"].metrics)
        if entropy is not None and len(self.first_entropies) < START_STEPS:
            self.first_entropies.append(finite[entropy])
        self.lowest = min(self.lowest, finite.get("critic/score/min", math.inf))
        self.highest = max(self.highest, finite.get("critic/score/max", -math.inf))

    def _so_far(self, metrics: Metrics) -> dict[str, Any]:
        """Return what the steps up to this one come to: the numbers that rules ask for beside metric and settings.

        `progress` is where the mean score lies between the lowest (0) and highest (1) so far; 0 always counts.
        """
        score, low, high = metrics.get(SCORE, math.nan), min(0.0, self.lowest), max(0.0, self.highest)
        start = fmean(self.first_entropies) if self.first_entropies else 0.0
        names = [f"{name}={value:g}" for name, value in metrics.items() if not math.isfinite(value)]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return self.texts | {
            "score": score,
            "progress": (score - low) / (high - low) if high > low else 0.0,
            "solved": self.config.solved,
            "lowest": self.lowest,
            "highest": self.highest,
            "start": start,
            "started": len(self.first_entropies) == START_STEPS,
            "least_entropy": max(self.config.entropy.floor, self.config.entropy.share_of_start * start),
            "limits_passed": self._limits_passed(metrics.get("actor/grad_norm", math.nan)),
            "not_finite": f"{', '.join(names[:MOST_NAMED])}{more}",
        }

    def _limits_passed(self, norm: float) -> str:
        """Name the limits of the gradient norm, before clipping, that this step's norm is above."""
        rule, earlier = self.config.grad_norm, list(self.grad_norms)[:-1]
        limits: dict[str, float] = {}
        if rule.threshold is not None:
            limits["trainer.health.grad_norm.threshold"] = rule.threshold
        if len(earlier) >= rule.window // 2:
            usual = median(earlier)
            of_median = f"the median of the {len(earlier)} steps before is {usual:.3g}"
            limits[of_median] = max(rule.factor * usual, rule.floor)
        return " and ".join(f"{limit:.3g} ({what})" for what, limit in limits.items() if norm > limit)


def _first(metrics: Metrics, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in metrics), None)
