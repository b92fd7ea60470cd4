"""What the scores of each agent have been on average, for the advantage estimator rae."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SCORES = "rae/"  # before the names of all metrics of this file
_MEAN, _COUNT, _BASELINE = f"{SCORES}score/", f"{SCORES}sequences/", f"{SCORES}baseline/"


def score_metrics(scores: Mapping[int, tuple[float, int]]) -> dict[str, float]:
    """Return `mean_scores` as metrics."""
    means = {f"{_MEAN}{role}": mean for role, (mean, _) in scores.items()}
    return means | {f"{_COUNT}{role}": float(count) for role, (_, count) in scores.items()}


@dataclass
class AgentBaselines:
    """Exponential moving averages of scores, by the number of an agent in a data source (`agents.baseline_keys`).

    SPIRAL (arXiv 2506.24119): b <- decay b + (1 - decay) score, sequence by sequence, from 0. Here the n sequences of
    a step count together, b <- decay^n b + (1 - decay^n) their mean, and their advantages are against b before it, so
    that the order of a step's sequences changes nothing.

    Attributes:
        decay: 0 to 1.
        values: b, by number.
    """

    decay: float
    values: dict[int, float] = field(default_factory=dict)

    def update(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of `score_metrics` of a step."""
        for name, mean in metrics.items():
            if name.startswith(_MEAN):
                role = int(name.removeprefix(_MEAN))
                kept = self.decay ** metrics[f"{_COUNT}{role}"]
                self.values[role] = kept * self.values.get(role, 0.0) + (1 - kept) * mean

    @staticmethod
    def recorded(metrics: Mapping[str, float]) -> dict[int, float]:
        """Return the baselines that `metrics` tells."""
        return {int(name.removeprefix(_BASELINE)): b for name, b in metrics.items() if name.startswith(_BASELINE)}

    def metrics(self) -> dict[str, float]:
        """Return the baselines as metrics."""
        return {f"{_BASELINE}{role}": value for role, value in self.values.items()}
