"""The built-in curriculum (`data.curriculum`): draws the prompts whose groups are expected to have different scores.

The pass rate p of each prompt has a Beta(a, b) posterior. a and b begin at `PRIOR`; a group of n scores adds the passed
ones to a and the failed ones to b. A prompt's weight is the variance that a score is expected to have:

    E[p (1 - p)] = a b / ((a + b) (a + b + 1))

The policy changes, so all evidence decays with every batch, and a prompt that has not been seen for long goes back to
the prior. Some of each batch are prompts that were drawn least often, whatever their weight. With `max_pass_rate`
prompts that have passed so often are not drawn again, as in ScaleRL (arXiv 2510.13786), which draws the others equally
often (`exploration` 1); of the others, where a batch cannot be filled without them, those that were drawn least often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_dist.data.prompts import Prompt

PRIOR = 0.5  # Jeffreys' prior: one group of 4 equal scores is enough for `EASY` or `HARD`
ROUNDING = 1e-9  # of a share of scores
EASY, HARD = 0.9, 0.1  # from and up to these posterior means nearly all groups of usual sizes have equal scores


class PassRateCurriculum:
    """Weighted draws by posterior pass rates. `CustomSampler` runs it as it runs a class of the user's.

    Args:
        seed: of the draws; each batch depends on it, its number and the scores so far.
        exploration: share of a batch that is drawn from the prompts that were drawn least often.
        decay: share of the evidence that is left after as many batches as an epoch has.
        max_pass_rate: share of passed scores, newer ones weighing more, from which on a prompt is drawn only where a
            batch cannot be filled without it; None: all are drawn.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        seed: int,
        *,
        exploration: float,
        decay: float,
        max_pass_rate: float | None = None,
    ) -> None:
        self.batch_size, self.seed, self.exploration, self.max_pass_rate = batch_size, seed, exploration, max_pass_rate
        self.left_per_batch = decay ** (1 / (len(prompts) // batch_size))
        self.num_batches, self.lowest, self.highest = 0, 0.0, 1.0
        self.passed, self.failed = np.zeros(len(prompts)), np.zeros(len(prompts))
        self.visits = np.zeros(len(prompts), np.int64)

    @property
    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Return a and b of each prompt: [num_prompts] float64 each."""
        return PRIOR + self.passed, PRIOR + self.failed

    def weights(self) -> np.ndarray:
        """Return E[p (1 - p)] of each prompt: [num_prompts] float64, above 0."""
        a, b = self.posterior
        return a * b / ((a + b) * (a + b + 1))

    @property
    def solved(self) -> np.ndarray:
        """Tell which prompts are not drawn again: [num_prompts] bool."""
        scores = self.passed + self.failed
        if self.max_pass_rate is None:
            return np.zeros(len(scores), bool)
        return (scores > 0) & (self.passed >= (self.max_pass_rate - ROUNDING) * scores)

    def next_batch(self) -> np.ndarray:
        """Draw a batch in random order: [batch_size] int64, no position twice."""
        rng = np.random.default_rng([self.seed, self.num_batches])
        self.num_batches += 1
        self.passed *= self.left_per_batch
        self.failed *= self.left_per_batch
        solved = self.solved
        ties, count = rng.random(len(self.visits)), int(self.exploration * self.batch_size + rng.random())
        least_visited = np.lexsort((ties, self.visits, solved))[:count]
        # the largest of log-weights with Gumbel noise are a weighted draw without replacement
        keys = np.log(self.weights()) + rng.gumbel(size=len(self.visits))
        keys[solved] = -np.inf
        keys[least_visited] = np.inf
        batch = rng.permutation(np.lexsort((ties, self.visits, -keys))[: self.batch_size])
        self.visits[batch] += 1
        return batch

    def update(self, scores_by_index: Mapping[int, np.ndarray]) -> None:
        """Count the passed and the failed scores of each prompt."""
        self.lowest = min([self.lowest, *(float(scores.min()) for scores in scores_by_index.values())])
        self.highest = max([self.highest, *(float(scores.max()) for scores in scores_by_index.values())])
        for index, scores in scores_by_index.items():
            passed = self._num_passed(scores.astype(np.float64))
            self.passed[index] += passed
            self.failed[index] += len(scores) - passed

    def metrics(self) -> dict[str, float]:
        """Return the shares of the prompts that are easy, useful, hard and unseen; they add up to 1."""
        a, b = self.posterior
        seen, means = a + b > 2 * PRIOR, a / (a + b)
        easy, hard = seen & (means >= EASY), seen & (means <= HARD)
        pools = {"easy": easy, "useful": seen & ~easy & ~hard, "hard": hard, "unseen": ~seen}
        return {name: float(pool.mean()) for name, pool in pools.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the evidence, the visits, the range of scores and the number of batches."""
        evidence = {"passed": self.passed.tolist(), "failed": self.failed.tolist(), "visits": self.visits.tolist()}
        return evidence | {"range": [self.lowest, self.highest], "num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.passed, self.failed = np.array(state["passed"], np.float64), np.array(state["failed"], np.float64)
        self.visits, self.num_batches = np.array(state["visits"], np.int64), state["num_batches"]
        self.lowest, self.highest = state["range"]

    def _num_passed(self, scores: np.ndarray) -> float:
        """Sum of the scores, where the range seen so far, which has 0 and 1 in it, is stretched to that from 0 to 1.

        Of several equal scores all count as passed or all as failed, whichever is nearer: a group that is always scored
        0.5 has no variance, while one that passes half the time has most.
        """
        shares = (scores - self.lowest) / (self.highest - self.lowest)
        if len(shares) > 1 and shares.min() == shares.max():
            shares = np.round(shares)
        return float(shares.sum())
