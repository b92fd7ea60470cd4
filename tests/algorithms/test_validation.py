"""best@k, worst@k and maj@n against numbers worked out by hand, and against every possible draw."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest

from grpo_dist.algorithms.validation import (
    best_at_k,
    interval,
    judged,
    majority_at_n,
    majority_score,
    normal_interval,
    subset_sizes,
    worst_at_k,
)
from tests.messages import refuses

NONE = np.nan


@pytest.mark.parametrize(
    ("n", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8]), (9, [2, 4, 8, 9])]
)
def test_subset_sizes(n: int, sizes: list[int]) -> None:
    assert subset_sizes(n) == sizes


def test_best_at_k_by_hand() -> None:
    """Of 1, 2, 4 the pairs are 12, 14, 24: best 2, 4, 4, worst 1, 1, 2. The order does not matter."""
    scores = np.array([[4.0, 1.0, 2.0]])
    assert best_at_k(scores, 1) == pytest.approx([7 / 3])
    assert best_at_k(scores, 2) == pytest.approx([10 / 3])
    assert best_at_k(scores, 3) == pytest.approx([4.0])
    assert worst_at_k(scores, 1) == pytest.approx([7 / 3])
    assert worst_at_k(scores, 2) == pytest.approx([4 / 3])
    assert worst_at_k(scores, 3) == pytest.approx([1.0])


@pytest.mark.parametrize("right", range(6))
def test_of_zeros_and_ones_best_at_k_is_pass_at_k(right: int) -> None:
    scores = np.array([[1.0] * right + [0.0] * (5 - right)])
    for k in range(1, 6):
        assert best_at_k(scores, k) == pytest.approx([1 - comb(5 - right, k) / comb(5, k)])


def test_best_at_k_is_the_mean_over_every_draw() -> None:
    scores = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    for k in range(1, 8):
        draws = [np.array(draw) for draw in combinations(range(7), k)]
        expected = np.mean([scores[:, draw].max(-1) for draw in draws], axis=0)
        assert best_at_k(scores, k) == pytest.approx(expected, abs=1e-6)
        expected = np.mean([scores[:, draw].min(-1) for draw in draws], axis=0)
        assert worst_at_k(scores, k) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("k", [0, 4])
def test_more_than_there_are_cannot_be_drawn(k: int) -> None:
    with refuses(ValueError, f"k={k}", "1 to n=3"):
        best_at_k(np.zeros((1, 3)), k)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([0, 1, 1, 2], 20.0),
        ([0, 1, 1, 0], 10.0),  # a tie: the first answer
        ([2, 1, 0, 0], 30.0),
        ([0, 1, 2, 3], 10.0),
        ([NONE, 1, NONE, NONE], 20.0),  # three say nothing
        ([NONE, NONE, 0, 1], 30.0),
        ([NONE] * 4, 10.0),
    ],
)
def test_majority(answers: list[float], expected: float) -> None:
    assert majority_score(np.array([10.0, 20, 30, 40]), np.array(answers)) == expected


def test_majority_of_each_prompt() -> None:
    scores, answers = np.array([[1.0, 0, 0], [0, 1, 0]]), np.array([[0.0, 1, 1], [NONE, 0, NONE]])
    assert majority_at_n(scores, answers).tolist() == [0, 1]


def test_intervals_by_hand() -> None:
    """Wilson's, of 1 in 10: centre (0.1 + 0.192073) / 1.384146, half width 1.416 * sqrt(0.009 + 0.009604)."""
    assert interval(np.array([1.0] + [0.0] * 9)) == pytest.approx((0.017876, 0.404150), abs=1e-5)
    assert interval(np.zeros(20)) == pytest.approx((0.0, 0.161125), abs=1e-5)  # z^2 / (n + z^2)
    assert interval(np.array([0.0, 1.0, 2.0, 3.0]), z=2.0) == pytest.approx((1.5 - 1.290994, 1.5 + 1.290994), abs=1e-5)
    assert interval(np.array([0.5])) == (-np.inf, np.inf)
    assert normal_interval(np.array([0.0, 1.0]), z=1.0) == pytest.approx((0.0, 1.0))  # 0.5 with sqrt(0.5 / 2) around


def test_what_is_judged() -> None:
    scores, failed = np.array([1.0, np.nan, -2.0]), np.array([False, True, False])
    found = judged(scores, failed, np.array([1.0, np.nan, 0.0]))
    assert {name: values.tolist() for name, values in found.items()} == {"reward": [1, -2, -2], "acc": [1, 0, 0]}
    assert list(judged(scores, failed, np.array([1.0, np.nan, np.nan]))) == ["reward"]  # not said of all
    assert judged(np.full(2, np.nan), np.array([True, True]), None) == {}
