"""The mixture of prompts of the benchmark, and its summary by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.curriculum import rows, summary


def test_three_quarters_of_the_prompts_have_four_digits() -> None:
    questions = [row["prompt"][0]["content"].removesuffix("=?").split("+") for row in rows(64)]
    assert Counter(len(a) for a, _ in questions) == {4: 48, 3: 16}
    carries = [any(int(x) + int(y) > 9 for x, y in zip(a, b, strict=True)) for a, b in questions if len(a) == 3]
    assert sum(carries) == 8
    sums = [str(int(a) + int(b)) for a, b in questions]
    assert [row["reward_model"]["ground_truth"] for row in rows(64)] == sums


def test_means_and_intervals_by_hand() -> None:
    """3 runs with 10, 20, 30 tokens: deviation 10, so 4.30 * 10 / sqrt(3). The other choice needs 0.5 of each."""
    runs = [
        {"choice": choice, "steps": 2 * i, "equal": 0.5, "tokens": share * i}
        for i in (1, 2, 3)
        for choice, share in (("uniform", 10.0), ("curriculum", 5.0))
    ]
    first, second = summary(runs)
    half = pytest.approx(24.83, abs=0.01)
    assert first == {
        "choice": "uniform", "steps": 4, "equal": 0.5, "tokens": 20, "+-": half, "ratio": 1, "+- ratio": 0
    }  # fmt: skip
    assert (second["tokens"], second["ratio"], second["+- ratio"]) == (10, 0.5, 0)
