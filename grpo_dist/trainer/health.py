"""Checks the metrics of each step against the rules of `trainer.health`.

    rule broken for `steps` steps in a row -> metric health/RULE = 1, and a message (warn) or HealthError (stop)

The rules are defined in `HealthConfig` (config/schema_health.py) and evaluated here. A step without a rule's metric
resets its count of steps in a row. A resumed run starts with empty windows.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from grpo_dist.config.schema_health import RULES, HealthConfig
from grpo_dist.errors import HealthError

START_STEPS = 5  # the entropy of one batch is a noisy start value
MOST_NAMED = 5

Metrics = Mapping[str, float]


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
        """Show the warnings, and stop the run if there are faults.

        Args:
            show: prints a message.
            checkpoint: folder of the last checkpoint, if there is one.

        Raises:
            HealthError: there are faults.
        """
        for warning in self.warnings:
            show(warning)
        if self.faults:
            go_on = f"the last checkpoint is {checkpoint}; the same command resumes from it"
            none = "there is no checkpoint to resume from (trainer.save_freq)"
            raise HealthError("\n".join([*self.faults, go_on if checkpoint else none]))


class HealthMonitor:
    """Checks the steps of a run, in order.

    Args:
        config: `trainer.health`.
    """

    def __init__(self, config: HealthConfig) -> None:
        self.config = config
        self._past = _Past(config)
        self._in_a_row: Counter[str] = Counter()
        self._told: dict[str, int] = {}

    def judge(self, metrics: Metrics, step: int) -> Judgement:
        """Check a step's metrics against all rules.

        Args:
            metrics: the step's metrics by name.
            step: the step's number.
        """
        self._past.add(metrics)
        judgement = Judgement()
        for name in RULES:
            settings = getattr(self.config, name)
            numbers = None if settings.action == "off" else _measure(name, metrics, self._past)
            self._in_a_row[name] = self._in_a_row[name] + 1 if numbers is not None and numbers["broken"] else 0
            if numbers is None:
                continue
            broken = self._in_a_row[name] >= settings.steps
            judgement.metrics[f"health/{name}"] = float(broken)
            if broken and settings.action == "stop":
                judgement.faults.append(self._text(name, numbers, step))
            elif broken and step - self._told.get(name, -math.inf) >= self.config.repeat_every:
                self._told[name] = step
                judgement.warnings.append(self._text(name, numbers, step))
        return judgement

    def _text(self, name: str, numbers: dict[str, Any], step: int) -> str:
        rule, progress = RULES[name], numbers.get("progress", 0.5)
        cause, advice = rule.cause, rule.advice
        if rule.solved is not None and progress >= self.config.solved:
            cause, advice = rule.solved
        elif rule.hopeless is not None and 1 - progress >= self.config.solved:
            cause, advice = rule.hopeless
        count = self._in_a_row[name]
        since = f", for {count} steps" if count > 1 else ""
        lines = [
            f"health/{name} at step {step}{since}: {rule.seen.format_map(numbers)}",
            f"likely: {cause}",
            f"try: {advice}",
            f"(trainer.health.{name})",
        ]
        return "\n  ".join(lines)


class _Past:
    """Values of earlier steps, and of the current one, that rules need.

    Args:
        config: `trainer.health`.

    Attributes:
        grad_norms: gradient norms of the last `window` steps and the current one.
        first_entropies: entropies of the first `START_STEPS` steps, nats.
        lowest: lowest score of a response so far.
        highest: highest score of a response so far.
    """

    def __init__(self, config: HealthConfig) -> None:
        self.config = config
        self.grad_norms: deque[float] = deque(maxlen=config.grad_norm.window + 1)
        self.first_entropies: list[float] = []
        self.lowest, self.highest = math.inf, -math.inf

    def add(self, metrics: Metrics) -> None:
        """Add a step. Non-finite metrics are ignored."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if "actor/grad_norm" in finite:
            self.grad_norms.append(finite["actor/grad_norm"])
        entropy = _first(finite, RULES["entropy"].metrics)
        if entropy is not None and len(self.first_entropies) < START_STEPS:
            self.first_entropies.append(finite[entropy])
        self.lowest = min(self.lowest, finite.get("critic/score/min", math.inf))
        self.highest = max(self.highest, finite.get("critic/score/max", -math.inf))

    def progress(self, score: float) -> float:
        """Where a mean score is between the lowest (0) and highest (1) score so far; a score of 0 always counts."""
        low, high = min(0.0, self.lowest), max(0.0, self.highest)
        return (score - low) / (high - low) if high > low else 0.0


def _measure(name: str, metrics: Metrics, past: _Past) -> dict[str, Any] | None:
    """Whether a rule is broken in this step, and the values for its message; None if the step lacks its metric."""
    rule, settings = RULES[name], getattr(past.config, name)
    metric = _first(metrics, rule.metrics)
    if (rule.metrics and metric is None) or not metrics.keys() >= set(rule.needs):
        return None
    numbers: dict[str, Any] = {"metric": metric, "limit": getattr(settings, "threshold", None)}
    if metric is not None:
        numbers["value"] = metrics[metric]
    if "critic/score/mean" in rule.needs:
        numbers["score"] = metrics["critic/score/mean"]
        numbers["progress"] = past.progress(numbers["score"])
    if name in _CHECKS:
        return numbers | _CHECKS[name](numbers, metrics, past)
    value = abs(numbers["value"]) if rule.both_signs else numbers["value"]
    return numbers | {"broken": value > numbers["limit"]}


def _grad_norm(numbers: dict[str, Any], metrics: Metrics, past: _Past) -> dict[str, Any]:
    """The gradient norm, before clipping, is close to that of the last steps."""
    rule, norm, earlier = past.config.grad_norm, numbers["value"], list(past.grad_norms)[:-1]
    limits: dict[str, float] = {}
    if rule.threshold is not None:
        limits["trainer.health.grad_norm.threshold"] = rule.threshold
    if len(earlier) >= rule.window // 2:
        usual = median(earlier)
        limits[f"the median of the {len(earlier)} steps before is {usual:.3g}"] = max(rule.factor * usual, rule.floor)
    passed = [f"{limit:.3g} ({what})" for what, limit in limits.items() if norm > limit]
    return {"broken": bool(passed), "limits": " and ".join(passed)}


def _entropy(numbers: dict[str, Any], metrics: Metrics, past: _Past) -> dict[str, Any]:
    """The policy keeps exploring until the task is solved."""
    rule, started = past.config.entropy, len(past.first_entropies) == START_STEPS
    start = fmean(past.first_entropies) if past.first_entropies else 0.0
    limit = max(rule.floor, rule.share_of_start * start)
    broken = started and numbers["value"] < limit and numbers["progress"] < past.config.solved
    return {"broken": broken, "limit": limit, "start": start}


def _no_reward(numbers: dict[str, Any], metrics: Metrics, past: _Past) -> dict[str, Any]:
    """Some response got a reward since the start."""
    return {"broken": past.lowest == past.highest <= numbers["limit"], "highest": past.highest}


def _non_finite(numbers: dict[str, Any], metrics: Metrics, past: _Past) -> dict[str, Any]:
    """Every metric is a finite number."""
    names = [f"{name}={value:g}" for name, value in metrics.items() if not math.isfinite(value)]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return {"broken": bool(names), "names": f"{', '.join(names[:MOST_NAMED])}{more}"}


# Rules that are more than one metric compared with a threshold.
_CHECKS = {
    "grad_norm": _grad_norm,
    "entropy": _entropy,
    "no_reward": _no_reward,
    "non_finite": _non_finite,
}


def _first(metrics: Metrics, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in metrics), None)
