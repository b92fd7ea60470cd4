"""The coefficient of the entropy bonus, as the entropy of the policy moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class EntropyController:
    """Holds the coefficient; with a target, moves it after each step.

    Skywork-OR1 (arXiv 2505.22312): c goes up by delta after a step whose entropy was at most the target, else down, to
    0 at least; the bonus has the weight c where the last entropy was at most the target, else 0. Here that is once for
    each step of the run, there for each optimizer step.

    Attributes:
        coef: c; without a target the weight itself.
        target: nats per token; None: the coefficient is fixed.
        delta: by how much c moves.
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
