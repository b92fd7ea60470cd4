"""Numbers worked out by hand, and the bootstrap against draws that are made one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.counterfactual import (
    DRAWS,
    LEAST_UNITS,
    SEED,
    advantage_statistics,
    gradient_statistics,
    group_sums,
    products,
    verdict,
    with_intervals,
)

# Responses of 2, 1, 1 and 2 tokens, in two groups; the last token trains by neither config, the one before by one.
ROWS, GROUPS = np.array([0, 0, 1, 2, 3, 3]), np.array([0, 0, 1, 1])
TRAINS = np.array([True, True, True, True, True, False])
X, Y = np.array([1.0, 1, -2, 3, 0, 0]), np.array([2.0, 0, 1, 3, 1, 0])


def statistics(x: np.ndarray, y: np.ndarray, trains: np.ndarray = TRAINS) -> dict[str, float]:
    with np.errstate(all="ignore"):
        found = advantage_statistics(group_sums((x, y), trains, ROWS, GROUPS).sum(1))
    return {name: float(value) for name, value in found.items()}


def test_statistics_of_six_tokens() -> None:
    """Responses push 1, -2, 3, 0 and 1, 1, 3, 1: only the second turns."""
    found = statistics(X, Y)
    # means 0.6 and 1.4; sums of products of deviations 4.8, of squares 13.2 and 5.2
    assert found["correlation"] == pytest.approx(4.8 / math.sqrt(13.2 * 5.2))
    assert found["correlation"] == pytest.approx(np.corrcoef(X[:5], Y[:5])[0, 1])
    assert found["sign_changes"] == 1 / 4
    assert found["effective_size"] == pytest.approx(6**2 / 14)
    assert found["other_effective_size"] == pytest.approx(6**2 / 12)
    assert (found["groups"], found["other_groups"]) == (2, 2)


def test_the_same_and_the_negated_push() -> None:
    same, turned = statistics(X, X), statistics(X, -X)
    assert (same["correlation"], same["sign_changes"]) == (pytest.approx(1), 0)
    assert (turned["correlation"], turned["sign_changes"]) == (pytest.approx(-1), 3 / 4)
    assert turned["effective_size"] == turned["other_effective_size"] == same["effective_size"]
    equal = statistics(np.array([2.0, 2, -2, 2, -2, 0]), X)["effective_size"]
    assert equal == pytest.approx(4), "pushes of one size count whole"


def test_what_is_not_defined_is_nan() -> None:
    """A config that pushes nothing, or all tokens alike, even by a number whose sums are rounded."""
    nothing = statistics(X, 0 * Y)
    assert math.isnan(nothing["correlation"])
    assert math.isnan(nothing["other_effective_size"])
    assert (nothing["groups"], nothing["other_groups"], nothing["sign_changes"]) == (2, 0, 0)
    assert math.isnan(statistics(X, 0.1 * TRAINS)["correlation"])


def test_the_cosine_of_gradients_in_parts() -> None:
    a, b = [torch.tensor([[3.0, 0]]), torch.tensor([4.0])], [torch.tensor([[0.0, 5]]), torch.tensor([5.0])]
    assert products(a, b) == [20, 25, 50]
    assert gradient_statistics(np.array(products(a, b)))["cosine"] == pytest.approx(20 / math.sqrt(25 * 50))


def test_the_interval_is_that_of_units_drawn_again() -> None:
    rng = np.random.default_rng(3)
    x, rows = rng.normal(size=40), np.arange(40)
    groups = rows // 4
    y = x + rng.normal(size=40)
    sums = group_sums((x, y), np.ones(40, bool), rows, groups)
    value, low, high = with_intervals("groups", sums)["correlation"]
    assert value == pytest.approx(np.corrcoef(x, y)[0, 1])
    drawn = np.random.default_rng(SEED).multinomial(10, np.full(10, 0.1), DRAWS)
    again = []
    for counts in drawn:
        taken = [4 * group + i for group, count in enumerate(counts) for _ in range(count) for i in range(4)]
        again.append(np.corrcoef(x[taken], y[taken])[0, 1])
    assert (low, high) == pytest.approx(tuple(np.quantile(again, (0.025, 0.975))))
    assert low < value < high


def test_one_unit_has_no_interval() -> None:
    value, *ends = with_intervals("mini-batches", np.array([[20.0], [25], [50]]))["cosine"]
    assert value == pytest.approx(0.5657, abs=1e-4)
    assert np.isnan(ends).all()


def told(x: np.ndarray, y: np.ndarray, *, by_gradient: bool = False) -> str:
    """The verdict on responses of one token, two in a group."""
    rows = np.arange(len(x))
    sums = {"groups": group_sums((x, y), np.ones(len(x), bool), rows, rows // 2)}
    return verdict(sums, with_intervals("groups", sums["groups"]), by_gradient=by_gradient)


def test_the_verdict() -> None:
    rng = np.random.default_rng(1)
    x = np.tile([1.0, -1], 200)
    noise = rng.choice([1.0, -1], 200).repeat(2) * x
    assert told(x, x) == told(x, 0.7 * x + 0.3 * noise) != told(x, -x)
    assert told(x, -x) == told(x, noise), "not alike is not the same way, be it opposed or not"
    partly = told(x, 0.3 * x + 0.7 * noise)
    assert partly not in (told(x, x), told(x, -x))
    few = 2 * LEAST_UNITS
    assert told(x[:few], x[:few]) == told(x, x)
    unknown = [
        told(x[: few - 2], x[: few - 2]),
        told(x[:few], noise[:few]),
        told(x, 0 * x),
        told(x, x, by_gradient=True),
        verdict({}, {}, by_gradient=False),
    ]
    assert len({text.partition(":")[0] for text in unknown}) == 1, unknown
    assert all(":" in text for text in unknown)
    assert str(LEAST_UNITS - 1) in unknown[0]
    assert "trainer.save_freq" in unknown[3]
    assert ":" not in told(x, x) + told(x, -x) + partly
