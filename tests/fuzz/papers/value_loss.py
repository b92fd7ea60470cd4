"""The value loss of one token."""

from __future__ import annotations

from tests.fuzz.papers import below, clip


def value_error(now: float, before: float, target: float, reach: float) -> float:
    """As PPO's authors (arXiv 1707.06347) have it in their code: the worse of two squared errors, halved."""
    moved = clip(now, before - reach, before + reach)
    plain, clipped = (now - target) ** 2 / 2, (moved - target) ** 2 / 2
    return clipped if moved != now and below(plain, clipped) else plain
