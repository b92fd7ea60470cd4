"""The algorithms a second time, written from the papers: row by row and token by token, in Python's own floats.

Slow and plain on purpose: no tensors, no tricks against overflow, one short function per formula.
"""

from collections.abc import Callable

# One list a response, in it one number a token; a mask has 1 on the tokens that count.
Rows = list[list[float]]

# Farther apart than float32 rounding and the steps of finite differences can move a number, relative to its size.
MARGIN = 1e-4


class Undecided(Exception):
    """Two numbers are so close that rounding decides: the batch is no test case."""


def below(x: float, bound: float) -> bool:
    """Whether x < bound; raises Undecided where they are all but equal."""
    if abs(x - bound) < MARGIN * max(1.0, abs(x), abs(bound)):
        raise Undecided(f"{x} against {bound}")
    return x < bound


def clip(x: float, low: float, high: float) -> float:
    """The nearest number to x from `low` to `high`; see `below`."""
    if below(x, low):
        return low
    return x if below(x, high) else high


def mean(values: list[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def masked(values: list[float], mask: list[float]) -> list[float]:
    """The numbers of a row that count."""
    return [value for value, counts in zip(values, mask, strict=True) if counts]


def by_token(function: Callable[..., float], *columns: Rows) -> Rows:
    """A function of the numbers that each token has in the columns."""
    return [[function(*token) for token in zip(*rows, strict=True)] for rows in zip(*columns, strict=True)]
