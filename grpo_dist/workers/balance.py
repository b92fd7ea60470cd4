"""Which rank works on which rows: equal counts, and nearly equal numbers of tokens."""

from __future__ import annotations

import numpy as np


def balance(lengths: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Deal rows to ranks, longest first, back and forth (0 1 1 0 0 1 ...).

    Args:
        lengths: tokens of each row.
        num_ranks: ranks to deal to.

    Returns:
        Row positions of each rank, ascending. Counts differ by at most one.
    """
    order = np.argsort(-lengths, kind="stable")
    turn = np.arange(len(order)) % (2 * num_ranks)
    rank = np.minimum(turn, 2 * num_ranks - 1 - turn)
    return [np.sort(order[rank == r]) for r in range(num_ranks)]
