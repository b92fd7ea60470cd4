"""The order of the prompts, batch by batch: seeded, resumable, the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_dist.errors import DataError

# What the order in a checkpoint depends on, and the config key of each.
_KEYS = {
    "sampler": "data.sampler, data.curriculum.enable",
    "num_prompts": "data.train_files",
    "seed": "data.seed",
    "shuffle": "data.shuffle",
}


def check_batch_size(num_prompts: int, batch_size: int) -> None:
    """Check that there is one batch at least."""
    if batch_size < 1:
        raise DataError(f"data.train_batch_size={batch_size}: must be at least 1")
    if num_prompts < batch_size:
        raise DataError(
            f"data.train_batch_size={batch_size}: the training set has only {num_prompts} rows (after "
            f"filtering and data.train_max_samples); set it to at most {num_prompts}, or add rows"
        )


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Check that a sampler's state belongs to this sampler."""
    for name, now in identity.items():
        if state.get(name) != now:
            raise DataError(
                f"{_KEYS[name]}: the checkpoint was written with {name}={state.get(name)}, this run has "
                f"{name}={now}; restore it, or start anew with trainer.resume_mode=disable"
            )


class PromptSampler:
    """Endless batches of prompt indices, epoch after epoch, in an order that no result changes.

    The order of an epoch is a permutation that depends on (seed, epoch) only, so a resumed run sees the
    batches that the uninterrupted run would have seen. The last, incomplete batch of an epoch is
    dropped; these are at most batch_size - 1 prompts, and with shuffling different ones in each epoch.

    Args:
        shuffle: permute each epoch anew; False: file order.
    """

    def __init__(self, num_prompts: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        check_batch_size(num_prompts, batch_size)
        self._num_prompts, self._batch_size = num_prompts, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._epoch, self._position = 0, 0
        self._order = self._epoch_order(0)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches in one pass over the data."""
        return self._num_prompts // self._batch_size

    @property
    def epoch(self) -> int:
        """Return the epoch of the batch that was last returned, from 0."""
        return self._epoch

    def next_batch(self) -> np.ndarray:
        """Return the indices of the next batch: [batch_size] int64, no index twice."""
        if self._position + self._batch_size > self._num_prompts:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order(self._epoch)
        batch = self._order[self._position : self._position + self._batch_size].copy()
        self._position += self._batch_size
        return batch

    def update(self, scores_by_index: Mapping[int, np.ndarray]) -> None:
        """Do nothing, since the order does not depend on results."""

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the prompts already handed out in it, and what the order depends on; plain numbers."""
        return {"epoch": self._epoch, "position": self._position} | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. The batch size may differ, the data and the order may not.

        Raises:
            DataError: the state belongs to another data set, seed or order.
        """
        check_identity(state, self._identity())
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._epoch_order(self._epoch)

    def _identity(self) -> dict[str, Any]:
        return {
            "sampler": type(self).__name__,
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._num_prompts, dtype=np.int64)
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_prompts).astype(np.int64)
