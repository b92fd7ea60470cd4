"""Rollout correction against the formulas of the papers, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_dist.algorithms import compute_rollout_correction
from grpo_dist.algorithms.correction import LEVELS, REJECTIONS, off_policy_mask, second_moment_mask
from tests.fuzz.batches import Shape, assert_near, decided, shapes
from tests.fuzz.papers import Rows, masked
from tests.fuzz.papers.corrections import importance_weights, kept, kpop_kept, m2po_kept, normalised, opsm_kept

BOUNDS = st.sampled_from([(None, 1.3), (None, 2.0), (None, 5.0), (0.5, 2.0), (0.7, 1.2), (0.1, 7.0)])


def text(bounds: tuple[float | None, float]) -> str:
    lower, upper = bounds
    return str(upper) if lower is None else f"{lower}_{upper}"


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
    assert_near(weights, shape.in_place(expected, 1.0))
    assert mask.tolist() == shape.masks, "weights leave the mask alone"


@pytest.mark.parametrize("name", REJECTIONS)
@given(policies=two_policies(), bounds=BOUNDS, second=st.sampled_from([None, *REJECTIONS]))
def test_rejection(
    name: str, policies: tuple[Shape, Rows, Rows], bounds: tuple[float | None, float], second: str | None
) -> None:
    """One criterion, or two: a token stays where each of them lets it."""
    shape, old, rollout = policies
    scale = {"k1": bounds, "kpop": (None, bounds[1] / 20)}  # whose divergences are small
    criteria = [(key, scale.get(key.split("_")[-1], (None, bounds[1]))) for key in (name, second) if key]
    rows = [[masked(row, mask) for row in pair] for *pair, mask in zip(old, rollout, shape.masks, strict=True)]

    def stay(p: list[float], q: list[float], key: str, limits: tuple[float | None, float]) -> list[bool]:
        differences = [a - b for a, b in zip(p, q, strict=True)]
        return kpop_kept(p, q, limits[1]) if key == "token_kpop" else kept(differences, key, *limits)

    with decided():
        answers = [[stay(*row, *criterion) for criterion in criteria] for row in rows]
    expected = [[all(token) for token in zip(*row, strict=True)] for row in answers]
    weights, mask, metrics = compute_rollout_correction(
        old_log_probs=shape.hide(old),
        rollout_log_probs=shape.hide(rollout),
        response_mask=shape.mask,
        rollout_rs=",".join(key for key, _ in criteria),
        rollout_rs_threshold=",".join(text(limits) for _, limits in criteria),
    )
    assert weights is None
    assert mask.tolist() == shape.in_place(expected, 0.0)
    tokens = shape.counts["global_tokens"]
    gone = 1 - sum(map(sum, expected)) / tokens if tokens else 0
    assert_near(torch.tensor(metrics["rollout_corr/rollout_rs_masked_fraction"]), gone)


@given(data=st.data(), policies=two_policies(), threshold=st.sampled_from([0.01, 0.04, 0.2, 1.0]))
def test_the_second_moment_of_a_batch(
    data: st.DataObject, policies: tuple[Shape, Rows, Rows], threshold: float
) -> None:
    """And of the batch with its rows in another order."""
    shape, old, rollout = policies
    advantages = data.draw(shape.on_grid(-4, 4, 4))
    order = data.draw(st.permutations(range(shape.rows)))
    flat = [
        [value for row, mask in zip(rows, shape.masks, strict=True) for value in masked(row, mask)]
        for rows in (lambdas(old, rollout), advantages)
    ]
    with decided():
        numbers = iter(m2po_kept(*flat, threshold))
    expected = shape.in_place([list(numbers)], 1.0)
    columns = {
        "old_log_probs": shape.hide(old),
        "rollout_log_probs": shape.hide(rollout),
        "advantages": shape.hide(advantages),
        "response_mask": shape.mask,
    }
    assert second_moment_mask(**columns, threshold=threshold).tolist() == expected
    moved = {name: values[list(order)] for name, values in columns.items()}
    assert second_moment_mask(**moved, threshold=threshold).tolist() == [expected[i] for i in order]


@given(data=st.data(), policies=two_policies(), delta=st.sampled_from([0.01, 0.1, 0.5]))
def test_off_policy_sequences(data: st.DataObject, policies: tuple[Shape, Rows, Rows], delta: float) -> None:
    shape, new, rollout = policies
    advantages = data.draw(shape.on_grid(-4, 4, 4))
    triples = zip(rollout, new, advantages, shape.masks, strict=True)
    rows = [[masked(row, mask) for row in columns] for *columns, mask in triples]
    with decided():
        expected = [opsm_kept(*row, delta) for row in rows]
    found = off_policy_mask(
        log_probs=shape.hide(new),
        rollout_log_probs=shape.hide(rollout),
        advantages=shape.hide(advantages),
        response_mask=shape.mask,
        threshold=delta,
    )
    assert found.tolist() == shape.in_place(expected, 1.0)
