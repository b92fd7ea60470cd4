"""Whether a run is healthy: each step's metrics against the rules of `trainer.health`.

    rule broken for `steps` steps in a row -> metric health/RULE = 1, and warn: a message; stop: HealthError

The rules are in health_rules.py. A step without a rule's metric says nothing of the rule, so it ends a row. A resumed
run starts with empty windows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from grpo_dist.config.schema_health import HealthConfig
from grpo_dist.errors import HealthError
from grpo_dist.trainer.health_rules import RULES, Look, Metrics, Past


@dataclass(frozen=True)
class Judgement:
    """What the rules say of a step.

    Attributes:
        metrics: `health/RULE`, 1 where the rule is broken and 0 where not; rules without their metric are left out.
        warnings: what to tell the user.
        faults: what the run has to stop for.
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
            go_on = f"the last checkpoint is {checkpoint}; the same command goes on from it"
            none = "there is no checkpoint to go on from (trainer.save_freq)"
            raise HealthError("\n".join([*self.faults, go_on if checkpoint else none]))


class HealthMonitor:
    """Judges the steps of a run, in order.

    Args:
        config: `trainer.health`.
    """

    def __init__(self, config: HealthConfig) -> None:
        self.config = config
        self._past = Past(config.grad_norm.window)
        self._in_a_row: Counter[str] = Counter()
        self._told: dict[str, int] = {}

    def judge(self, metrics: Metrics, step: int) -> Judgement:
        """Hold a step's metrics against all rules.

        Args:
            metrics: the step's metrics by name.
            step: its number.
        """
        self._past.add(metrics)
        judgement = Judgement()
        for name, rule in RULES.items():
            action = getattr(self.config, name).action
            look = None if action == "off" else rule(metrics, self._past, self.config)
            self._in_a_row[name] = self._in_a_row[name] + 1 if look is not None and look.broken else 0
            if look is None:
                continue
            broken = self._in_a_row[name] >= getattr(getattr(self.config, name), "steps", 1)
            judgement.metrics[f"health/{name}"] = float(broken)
            if broken and action == "stop":
                judgement.faults.append(self._text(name, look, step))
            elif broken and step - self._told.get(name, -math.inf) >= self.config.repeat_every:
                self._told[name] = step
                judgement.warnings.append(self._text(name, look, step))
        return judgement

    def _text(self, name: str, look: Look, step: int) -> str:
        count = self._in_a_row[name]
        since = f", for {count} steps" if count > 1 else ""
        return (
            f"health/{name} at step {step}{since}: {look.seen}\n  likely: {look.cause}\n  try: {look.advice}\n"
            f"  (trainer.health.{name})"
        )
