"""Gradients of the papers' formulas: differences of their values in float64, extrapolated to a step of 0."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

STEP = 0.01
# Of the finest of these differences: rounding 1e-13 of the value, truncation less.
LEVELS = 3
# What two steps may differ by, as a share of the value or of 1: more is a kink of the function nearby.
KINK = 1e-8


def slope(function: Callable[[float], float], x: float) -> float:
    """The derivative at x.

    Raises:
        ValueError: the function has a kink nearby, so that the case is badly chosen.
    """
    fine, coarse = richardson(function, x, STEP / 2), richardson(function, x, STEP)
    if abs(fine - coarse) > KINK * max(1.0, abs(function(x)), abs(fine)):
        raise ValueError(f"a kink near {x}: {fine} and {coarse}")
    return fine


def richardson(function: Callable[[float], float], x: float, step: float) -> float:
    """Central differences of halved steps, in which the lowest powers of the step cancel."""
    steps = [step / 2**level for level in range(LEVELS)]
    found = [(function(x + h) - function(x - h)) / (2 * h) for h in steps]
    for power in range(1, LEVELS):
        found = [(4**power * finer - coarser) / (4**power - 1) for coarser, finer in pairwise(found)]
    return found[0]
