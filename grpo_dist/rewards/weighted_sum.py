"""The sum of the scores that several reward functions gave a response; see weighted.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from grpo_dist.errors import RewardError
from grpo_dist.rewards.base import Part, RewardResult


def weighted_sum(parts: Sequence[Part], results: Sequence[RewardResult]) -> dict[str, Any]:
    """The sum of the scores that functions gave a response.

    Args:
        parts: the functions.
        results: of each.

    Returns:
        score, each function's score under its label, and their extra values as `LABEL.NAME`; `acc` of the first that
        gives it, and `pred` of the first that finds an answer. If a function judges steps also `step_scores`, and its
        own ones as `LABEL.step_scores`.

    Raises:
        RewardError: no function applies to the response, or two of them judge another number of steps.
    """
    total = 0.0
    found: dict[str, Any] = {}
    whole = 0.0  # what judges the whole response
    judged: list[tuple[str, float, tuple[float, ...]]] = []
    applying = [(part, result) for part, result in zip(parts, results, strict=True) if result.applies]
    if not applying:
        names = ", ".join(part.function.name for part in parts)
        raise RewardError(f"{names} returned None for the response: one of them must return a finite number")
    for (label, _, weight), result in applying:
        total += weight * result.score
        if result.step_scores is None:
            whole += weight * result.score
        else:
            judged.append((label, weight, result.step_scores))
        if result.pred is not None:
            found.setdefault("pred", result.pred)
        if "acc" in result.extra:
            found.setdefault("acc", result.extra["acc"])
        found |= {label: result.score, **{f"{label}.{name}": value for name, value in result.extra.items()}}
    return found | {"score": total} | _steps(judged, whole)


def _steps(judged: Sequence[tuple[str, float, tuple[float, ...]]], whole: float) -> dict[str, Any]:
    """The scores of steps: of each function (label, weight, scores) that judges them, and their sum."""
    if not judged:
        return {}
    counts = {label: len(scores) for label, _, scores in judged}
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{label} {count}" for label, count in counts.items())
        raise RewardError(f"the functions judge different numbers of steps of a response: {numbers}")
    weights = [weight for _, weight, _ in judged]
    by_step = zip(*(scores for *_, scores in judged), strict=True)
    sums = [math.fsum(weight * score for weight, score in zip(weights, step, strict=True)) for step in by_step]
    if sums:
        sums[-1] += whole
    return {"step_scores": sums} | {f"{label}.step_scores": list(scores) for label, _, scores in judged}
