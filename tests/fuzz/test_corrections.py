"""Rollout correction against the formulas of the papers, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_dist.algorithms import compute_rollout_correction
from grpo_dist.algorithms.correction import LEVELS, REJECTIONS
from tests.fuzz.batches import EXAMPLES, Shape, assert_near, decided, shapes
from tests.fuzz.papers import Rows, masked
from tests.fuzz.papers.corrections import importance_weights, kept, normalised

BOUNDS = st.sampled_from([(None, 1.3), (None, 2.0), (None, 5.0), (0.5, 2.0), (0.7, 1.2), (0.1, 7.0)])


def text(bounds: tuple[float | None, float]) -> str:
    lower, upper = bounds
    return str(upper) if lower is None else f"{lower}_{upper}"


def scattered(rows: list[list], masks: Rows, off: float) -> Rows:
    """Numbers of trained tokens at their places, `off` elsewhere."""
    numbers = [iter(row) for row in rows]
    return [[float(next(row)) if m else off for m in mask] for row, mask in zip(numbers, masks, strict=True)]


@st.composite
def two_policies(draw: st.DrawFn) -> tuple[Shape, Rows, Rows]:
    """(shape, log-probs of the trainer's policy, of the sampler)."""
    shape = draw(shapes())
    rollout, change = draw(shape.on_grid(-80, -40, 16)), draw(shape.on_grid(-32, 32, 16) | shape.on_grid(-4, 4, 16))
    old = [[r + c for r, c in zip(*rows, strict=True)] for rows in zip(rollout, change, strict=True)]
    return shape, old, rollout


def lambdas(old: Rows, rollout: Rows) -> Rows:
    return [[o - r for o, r in zip(*rows, strict=True)] for rows in zip(old, rollout, strict=True)]


@pytest.mark.parametrize("level", LEVELS)
@given(policies=two_policies(), bounds=BOUNDS, normalise=st.booleans())
@EXAMPLES
def test_importance_weights(
    level: str, policies: tuple[Shape, Rows, Rows], bounds: tuple[float | None, float], normalise: bool
) -> None:
    shape, old, rollout = policies
    with decided():
        expected = importance_weights(lambdas(old, rollout), shape.masks, level, *bounds)
    if normalise:
        expected = normalised(expected, level)
    weights, mask, _ = compute_rollout_correction(
        old_log_probs=shape.hide(old),
        rollout_log_probs=shape.hide(rollout),
        response_mask=shape.mask,
        rollout_is=level,
        rollout_is_threshold=text(bounds),
        rollout_is_batch_normalize=normalise,
    )
    assert weights is not None
    assert_near(weights, scattered(expected, shape.masks, 1.0))
    assert mask.tolist() == shape.masks, "weights leave the mask alone"


@pytest.mark.parametrize("name", REJECTIONS)
@given(policies=two_policies(), bounds=BOUNDS, second=st.sampled_from([None, *REJECTIONS]))
@EXAMPLES
def test_rejection(
    name: str, policies: tuple[Shape, Rows, Rows], bounds: tuple[float | None, float], second: str | None
) -> None:
    """One criterion, or two: a token stays where each of them lets it."""
    shape, old, rollout = policies
    criteria = [(each, bounds if each.endswith("k1") else (None, bounds[1])) for each in (name, second) if each]
    rows = [masked(row, mask) for row, mask in zip(lambdas(old, rollout), shape.masks, strict=True)]
    with decided():
        expected = [
            [all(each) for each in zip(*(kept(row, *(key, *limits)) for key, limits in criteria), strict=True)]
            for row in rows
        ]
    weights, mask, metrics = compute_rollout_correction(
        old_log_probs=shape.hide(old),
        rollout_log_probs=shape.hide(rollout),
        response_mask=shape.mask,
        rollout_rs=",".join(key for key, _ in criteria),
        rollout_rs_threshold=",".join(text(limits) for _, limits in criteria),
    )
    assert weights is None
    assert mask.tolist() == scattered(expected, shape.masks, 0.0)
    left = sum(map(sum, expected)) / max(1, shape.tokens)
    assert_near(torch.tensor(metrics["rollout_corr/rollout_rs_masked_fraction"]), 1 - left)
