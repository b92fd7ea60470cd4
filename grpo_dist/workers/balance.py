"""Distributes rows over ranks: whole groups, so that each prompt is computed once, at nearly equal cost per rank.

Ranks that split sequences (engines/train/ulysses.py) have the same rows, and count as one here.
"""

from __future__ import annotations

import numpy as np

from grpo_dist.engines.train.micro_batch_plan import Lengths


def balance(lengths: Lengths, num_ranks: int) -> list[np.ndarray]:
    """Distribute rows over ranks at nearly equal cost, keeping groups whole if possible.

    While the slowest rank costs over 5 % more than the mean, the largest group is cut in half; each half then computes
    the prompt again.

    Args:
        lengths: groups, prompt lengths and response lengths of the rows.
        num_ranks: number of ranks.

    Returns:
        Row indices of each rank, ascending, int64.
    """
    items = lengths.items()
    parts, worst = _deal(items, lengths, num_ranks)
    mean = sum(map(lengths.cost, items)) / num_ranks if items else 0.0
    for _ in range(2 * num_ranks):
        if worst <= 1.05 * mean or max(map(len, items), default=1) < 2:
            break
        largest = max((i for i, item in enumerate(items) if len(item) > 1), key=lambda i: lengths.cost(items[i]))
        middle = len(items[largest]) // 2
        items = [*items[:largest], items[largest][:middle], items[largest][middle:], *items[largest + 1 :]]
        trial, trial_worst = _deal(items, lengths, num_ranks)
        if trial_worst < worst:
            parts, worst = trial, trial_worst
    return parts


def _deal(items: list[np.ndarray], lengths: Lengths, num_ranks: int) -> tuple[list[np.ndarray], float]:
    """Greedy longest-processing-time-first: each item goes to the part with the lowest cost so far."""
    costs = [lengths.cost(item) for item in items]
    loads, parts = [0.0] * num_ranks, [[np.empty(0, dtype=np.int64)] for _ in range(num_ranks)]
    for i in np.argsort(-np.asarray(costs), kind="stable").tolist():
        part = int(np.argmin(loads))
        parts[part].append(items[i])
        loads[part] += costs[i]
    return [np.sort(np.concatenate(part)) for part in parts], max(loads)
