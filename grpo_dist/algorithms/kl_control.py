"""The coefficient of the KL penalty in the reward: fixed, or steered towards a target."""

from __future__ import annotations

from dataclasses import dataclass

# One update changes the coefficient by at most this share of num_sequences / horizon.
MAX_ERROR = 0.2


@dataclass
class KLController:
    """Holds the coefficient; with a target, moves it after each batch.

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
