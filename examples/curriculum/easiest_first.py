"""A curriculum of your own: each epoch goes from the prompts that are solved most often to the hardest.

Nothing is known before the first epoch, so its order is random; ties stay random later on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_dist.data import Prompt


class EasiestFirst:
    """Sorts by running success rate.

    Args:
        prompts: the training prompts; positions in this list are what `next_batch` returns.
        batch_size: `data.train_batch_size`.
        seed: `data.seed`.
    """

    DECAY = 0.5  # how much of the old rate stays when a prompt is seen again
    UNKNOWN = 0.5  # rate of a prompt that was never seen

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, seed: int) -> None:
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0
        self.rates: list[float | None] = [None] * len(prompts)
        self.waiting: list[int] = self._order()

    def next_batch(self) -> list[int]:
        """The easiest prompts of this epoch that are still waiting."""
        if len(self.waiting) < self.batch_size:
            self.epoch += 1
            self.waiting = self._order()
        batch, self.waiting = self.waiting[: self.batch_size], self.waiting[self.batch_size :]
        return batch

    def update(self, scores_by_index: Mapping[int, np.ndarray]) -> None:
        """Move each prompt's rate towards the mean score of its new responses."""
        for index, scores in scores_by_index.items():
            old, new = self.rates[index], float(np.mean(scores))
            self.rates[index] = new if old is None else self.DECAY * old + (1 - self.DECAY) * new

    def state_dict(self) -> dict[str, Any]:
        """Everything the order depends on, as JSON."""
        return {"epoch": self.epoch, "rates": self.rates, "waiting": self.waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.epoch, self.rates, self.waiting = state["epoch"], state["rates"], state["waiting"]

    def _order(self) -> list[int]:
        shuffled = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.rates)).tolist()
        return sorted(shuffled, key=lambda i: -self._rate(i))

    def _rate(self, index: int) -> float:
        rate = self.rates[index]
        return self.UNKNOWN if rate is None else rate
