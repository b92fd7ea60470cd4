"""best@k, worst@k and maj@n against numbers worked out by hand, and against every possible draw."""

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


def test_sizes_and_best_at_k_by_hand() -> None:
    sizes = {1: [], 2: [2], 3: [2, 3], 4: [2, 4], 6: [2, 4, 6], 8: [2, 4, 8], 9: [2, 4, 8, 9]}
    assert {n: subset_sizes(n) for n in sizes} == sizes
    # Of 1, 2, 4 the pairs are 12, 14, 24: best 2, 4, 4, worst 1, 1, 2. The order does not matter.
    scores = np.array([[4.0, 1.0, 2.0]])
    for k, best, worst in ((1, 7 / 3, 7 / 3), (2, 10 / 3, 4 / 3), (3, 4.0, 1.0)):
        assert (best_at_k(scores, k), worst_at_k(scores, k)) == (pytest.approx([best]), pytest.approx([worst]))
    for k in (0, 4):
        with refuses(ValueError, f"k={k}", "1 to n=3"):
            best_at_k(np.zeros((1, 3)), k)


def test_best_at_k_is_the_mean_over_every_draw() -> None:
    scores = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    zeros_and_ones = (np.arange(7) < np.arange(8)[:, None]).astype(np.float32)
    for k in range(1, 8):
        draws = [np.array(draw) for draw in combinations(range(7), k)]
        for judge, extreme in ((best_at_k, np.max), (worst_at_k, np.min)):
            expected = np.mean([extreme(scores[:, draw], -1) for draw in draws], axis=0)
            assert judge(scores, k) == pytest.approx(expected, abs=1e-6)
        expected = [1 - comb(7 - right, k) / comb(7, k) for right in range(8)]
        assert best_at_k(zeros_and_ones, k) == pytest.approx(expected)


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
    of_two = majority_at_n(np.array([[10.0, 20, 30, 40]] * 2), np.array([answers, [NONE, NONE, 0, 1]]))
    assert of_two.tolist() == [expected, 30]


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
