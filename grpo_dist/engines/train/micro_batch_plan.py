"""Which rows go to which rank and into which micro-batch: whole groups first, so that their prompt is computed once.

An item is a prompt with some of its responses. Its cost counts tokens and, for long ones, attention:

    cost = tokens + attended pairs / ATTENTION_PAIRS

Ranks that split sequences (ulysses.py) have the same rows, and count as one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_dist.protocol import DataProto
from grpo_dist.protocol.media import media_of

# Pairs of tokens whose attention costs as much as one token in the linear layers: 6 * hidden_size, for a model of
# hidden_size 2048. It weighs the balance only; results do not depend on it.
ATTENTION_PAIRS = 12_288


@dataclass(frozen=True)
class Lengths:
    """Rows to plan for, aligned: the group of each row (equal prompts), tokens of its prompt and response."""

    groups: np.ndarray
    prompts: np.ndarray
    responses: np.ndarray

    def items(self) -> list[np.ndarray]:
        """The rows of each group, in the order of their first row."""
        if not len(self.groups):
            return []
        _, first, inverse = np.unique(self.groups, return_index=True, return_inverse=True)
        by_first_row = first[inverse]
        rows = np.argsort(by_first_row, kind="stable")
        return np.split(rows, np.flatnonzero(np.diff(by_first_row[rows])) + 1)

    def tokens(self, rows: np.ndarray, *, shared: bool = True) -> int:
        """Tokens of one item; its prompt counts once if it is shared."""
        prompts = self.prompts[rows[:1]] if shared else self.prompts[rows]
        return int(prompts.sum() + self.responses[rows].sum())

    def cost(self, rows: np.ndarray) -> float:
        """Cost of one item, in tokens."""
        return float(self._prompt_costs[rows[0]] + self._response_costs[rows].sum())

    @functools.cached_property
    def _prompt_costs(self) -> np.ndarray:
        prompts = self.prompts.astype(np.float64)
        return prompts + prompts**2 / 2 / ATTENTION_PAIRS

    @functools.cached_property
    def _response_costs(self) -> np.ndarray:
        prompts, responses = self.prompts.astype(np.float64), self.responses.astype(np.float64)
        return responses + responses * (prompts + responses / 2) / ATTENTION_PAIRS


def group_rows(data: DataProto) -> np.ndarray:
    """The group of each row: rows with equal prompts have equal numbers, from 0 in order of appearance.

    Prompts are equal if their tokens are, and their pictures.
    """
    digests = ["" if media is None else media.digest for media in media_of(data)]
    numbers: dict[tuple[str, bytes], int] = {}
    keys = zip(digests, (row.numpy().tobytes() for row in data["prompts"].rows()), strict=True)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing bin packing: indices of each bin. What is larger than `capacity` gets a bin of its own."""
    bins: list[list[int]] = []
    room = np.full(len(sizes), capacity)
    for i in np.argsort(-np.asarray(sizes), kind="stable").tolist():
        fits = room[: len(bins)] >= sizes[i]
        chosen = int(fits.argmax()) if fits.any() else len(bins)
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(i)
        room[chosen] -= sizes[i]
    return bins


def plan_micro_batches(
    lengths: Lengths,
    *,
    micro_batch_size: int,
    max_token_len: int | None,
    shared: bool,
    agree: Callable[[int], int],
    split: bool = True,
) -> list[np.ndarray]:
    """Rows of each micro-batch.

    Args:
        max_token_len: most tokens of a micro-batch (one sequence may exceed it); None: count sequences.
        shared: whether a group's prompt counts once.
        agree: from this rank's number of micro-batches to that of all ranks (their maximum): collectives of the
            ranks match only if all make equally many. A rank that needs fewer gets empty ones.
        split: whether a group that is too large is cut; else it gets a micro-batch of its own, whatever its size.

    Returns:
        Row indices of each micro-batch, the costliest first. Every row appears once.
    """
    size: Callable[[np.ndarray], int] = len
    if max_token_len is not None:
        size = functools.partial(lengths.tokens, shared=shared)
    capacity = micro_batch_size if max_token_len is None else max_token_len
    items = lengths.items()
    if split:
        items = [part for item in items for part in _split_to_fit(item, capacity, size)]
    sizes = [size(item) for item in items]
    bins = first_fit(sizes, capacity)
    count = agree(max(len(bins), 1))
    bins = _even(bins, items, sizes, lengths, capacity, count)
    bins.sort(key=lambda members: -sum(lengths.cost(items[i]) for i in members))
    rows = [np.concatenate([items[i] for i in members]) for members in bins if members]
    return [*rows, *(np.empty(0, dtype=np.int64) for _ in range(count - len(rows)))]


def _split_to_fit(item: np.ndarray, capacity: int, size: Callable[[np.ndarray], int]) -> list[np.ndarray]:
    """Cut a group into the fewest parts of nearly equal counts that each fit, or hold one row."""
    if size(item) <= capacity:
        return [item]
    for count in range(2, len(item) + 1):
        parts = np.array_split(item, count)
        if count == len(item) or all(size(part) <= capacity for part in parts):
            return parts
    return [item]


def _even(
    bins: list[list[int]], items: list[np.ndarray], sizes: list[int], lengths: Lengths, capacity: int, count: int
) -> list[list[int]]:
    """Return the items of `bins` in `count` bins of nearly equal cost, if they fit so; else `bins` as they are."""
    costs = [lengths.cost(item) for item in items]
    even: list[list[int]] = [[] for _ in range(count)]
    used, loads = np.zeros(count, dtype=np.int64), np.zeros(count)
    for i in np.argsort(-np.asarray(costs), kind="stable").tolist():
        fits = (used == 0) | (used + sizes[i] <= capacity)
        if not fits.any():
            return bins
        chosen = int(np.where(fits, loads, np.inf).argmin())
        even[chosen].append(i)
        used[chosen] += sizes[i]
        loads[chosen] += costs[i]
    return even


def balance(lengths: Lengths, num_ranks: int) -> list[np.ndarray]:
    """Distribute rows over ranks at nearly equal cost, keeping groups whole if possible.

    While the slowest rank costs over 5 % more than the mean, the largest group is cut in half; each half then computes
    the prompt again.

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
