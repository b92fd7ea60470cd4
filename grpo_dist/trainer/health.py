"""Checks the metrics of each step against the rules of `trainer.health`.

    rule broken for `steps` steps in a row -> metric health/RULE = 1, and a message (warn) or HealthError (stop)

The rules are a table in config/schema_health.py; here are the numbers that they ask for. A step without a rule's metric
resets its count of steps in a row. A resumed run starts with empty windows. What the rule `agreement` asks for is
measured before the first update.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from grpo_dist.algorithms.agreement import most_apart
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_health import RULES, SCORE, HealthConfig
from grpo_dist.errors import GrpoDistError, HealthError, WorkerLost, in_a_line
from grpo_dist.plan.rules import engine_of, other_type
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.workers.roles import Roles

START_STEPS = 5  # the entropy of one batch is a noisy start value
MOST_NAMED = 5
ROUNDED = 16  # responses from all over the first batch that the trainer computes in another type too
NOT_COMPARED = "engine and trainer are not compared before the first update"

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
        """Show the warnings, and stop the run if there are faults; `checkpoint` is its last one.

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

    Attributes:
        grad_norms: gradient norms of the last `window` steps and the current one.
        first_entropies: entropies of the first `START_STEPS` steps, nats.
        texts: parts of messages, by name, that no number of the steps gives.
        lowest: lowest score of a response so far.
        highest: highest score of a response so far.
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
        lines = [
            f"health/{name} at step {step}{since}: {rule.seen.format_map(numbers)}",
            f"likely: {cause}",
            f"try: {advice.format_map(numbers)}",
            f"(trainer.health.{name})",
        ]
        return "\n  ".join(lines)

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

        `progress` tells where the mean score is between the lowest (0) and highest (1) score so far; a score of 0
        always counts.
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


async def first_agreement(
    config: RunConfig, roles: Roles, batch: DataProtoRef, version: int
) -> tuple[dict[str, float], str]:
    """Compare the log-probs of engines and trainer on the first batch.

    Args:
        version: of the trainer's weights; tokens of older ones do not count.

    Returns:
        (metrics; what they say, and in a second line the worst token). Without metrics: why nothing is judged.
    """
    reasons = [*(f"actor_rollout_ref.rollout.{name}" for name in config.filters), *engine_of(config).inexact(config)]
    if config.algorithm.rollout_correction.bypass_mode:
        reasons = ["algorithm.rollout_correction.bypass_mode"]
    if reasons:
        return {}, f"{NOT_COMPARED}: {', '.join(reasons)}"
    if "old_log_probs" not in batch.columns:
        batch = batch.union(await roles.actor.compute_log_probs("old_log_prob", batch))
    tokens, mean, largest, worst = await roles.reward.compare_log_probs(batch, version)
    if not tokens:
        return {}, f"{NOT_COMPARED}: no token that trains was sampled by the present weights"
    rounding = None
    try:
        if dtype := other_type(config):
            rows = batch.reorder(np.linspace(0, len(batch) - 1, ROUNDED))
            rounded = await roles.actor.compute_log_probs("old_log_prob", rows, "compute_in_type", dtype)
            _, rounding, _, _ = await roles.reward.compare_log_probs(rows.replace(rounded), 0)
    except GrpoDistError as error:
        if isinstance(error, WorkerLost):
            raise
        return {}, f"{NOT_COMPARED}: passes in {dtype}, which show what rounding does, fail: {in_a_line(error)}"
    most, most_of_one = most_apart(rounding)
    measured = {"mean": mean, "max": largest, "of_limit": max(mean / most, largest / most_of_one)}
    left_out = "; those of older weights are left out" if (batch["weight_version"] < version).any() else ""
    limit = "" if math.isinf(most_of_one) else f" (limit {most_of_one:g})"
    text = (
        f"before the first update log-probs of engine and trainer differ by {mean:.2g} nats (limit {most:.2g}) on "
        f"average, and by up to {largest:.2g}{limit}, in {tokens:,} tokens{left_out}"
    )
    return {f"training/agreement/{name}": value for name, value in measured.items()}, f"{text}\n  worst: {worst}"
