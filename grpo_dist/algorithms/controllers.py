"""What moves from step to step by what a run has seen, and checkpoints keep: coefficients, and baselines of agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class EntropyController:
    """Holds the coefficient of the entropy bonus; with a target, moves it after each step.

    Skywork-OR1 (arXiv 2505.22312): c goes up by delta after a step whose entropy was at most the target, else down, to
    0 at least; the bonus has the weight c where the last entropy was at most the target, else 0. Here that is once for
    each step of the run, there for each optimizer step.

    Attributes:
        coef: c; without a target the weight itself.
        target: nats per token; None: the coefficient is fixed.
        entropy: of the last step, nats per token; None: there was none.
    """

    coef: float
    target: float | None = None
    delta: float = 0.005
    entropy: float | None = None

    @property
    def weight(self) -> float:
        """The weight of the bonus in the coming step."""
        below = self.entropy is not None and self.target is not None and self.entropy <= self.target
        return self.coef if self.target is None or below else 0.0

    def update(self, entropy: float) -> None:
        """Take in the mean entropy of a step (nats per token)."""
        if self.target is None:
            return
        self.entropy = entropy
        self.coef = max(0.0, self.coef + (self.delta if entropy <= self.target else -self.delta))

    def state_dict(self) -> dict[str, float]:
        """Return what moves; {} before the first step, and without a target."""
        return {} if self.entropy is None else {"coef": self.coef, "entropy": self.entropy}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on where `state` was taken; without a target the coefficient stays the config's."""
        if self.target is not None and state:
            self.coef, self.entropy = state["coef"], state["entropy"]


# One update changes the coefficient by at most this share of num_sequences / horizon.
MAX_ERROR = 0.2


@dataclass
class KLController:
    """Holds the coefficient of the KL penalty in the reward; with a target, moves it after each batch.

    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon (arXiv 1909.08593, section 2.2; as verl's).

    Attributes:
        coef: the coefficient now. It is the whole state: checkpoint it.
        target_kl: nats per token; None: the coefficient is fixed.
        horizon: sequences over which a constant error of 1 would double the coefficient, were it not clipped.
    """

    coef: float
    target_kl: float | None = None
    horizon: float = 10_000

    def update(self, kl: float, num_sequences: int) -> None:
        """Take in a batch of `num_sequences` with mean KL `kl` (nats per token)."""
        if self.target_kl is None:
            return
        error = min(max(kl / self.target_kl - 1, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1 + error * num_sequences / self.horizon


SCORES = "rae/"  # before the names of all metrics of this file
_MEAN, _COUNT, _BASELINE = f"{SCORES}score/", f"{SCORES}sequences/", f"{SCORES}baseline/"


def score_metrics(scores: Mapping[int, tuple[float, int]]) -> dict[str, float]:
    """Return `mean_scores` as metrics."""
    means = {f"{_MEAN}{role}": mean for role, (mean, _) in scores.items()}
    return means | {f"{_COUNT}{role}": float(count) for role, (_, count) in scores.items()}


@dataclass
class AgentBaselines:
    """Exponential moving averages of scores, by the number of an agent in a data source (`baseline_keys`).

    SPIRAL (arXiv 2506.24119): b <- decay b + (1 - decay) score, sequence by sequence, from 0. Here the n sequences of
    a step count together, b <- decay^n b + (1 - decay^n) their mean, and their advantages are against b before it, so
    that the order of a step's sequences changes nothing.
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
