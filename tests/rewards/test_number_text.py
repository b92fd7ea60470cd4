from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest

from grpo_dist.rewards.number_text import accepted_answers, contains
from tests.messages import refuses


@pytest.mark.parametrize(
    ("text", "part", "expected"),
    [
        ("a cat", "cat", True),
        ("cats", "cat", False),
        ("2.5", "2.5", True),
        ("12.5", "2.5", False),
        ("2.51", "2.5", False),
        ("1,000", "1,000", True),
        ("1,000,000", "000", False),
        ("v.5", "5", True),
        ("x/5", "5", True),
        ("(5)", "(5)", True),
        ("5 apples", "5 apples", True),
        ("2.5 apples", "5 apples", False),
        ("5.", "5", True),
        ("5...7", "5", True),
        ("", "5", False),
    ],
)
def test_contains(text: str, part: str, expected: bool) -> None:
    assert contains(text, part) == expected


def test_accepted_answers() -> None:
    assert accepted_answers(" 4 ") == ["4"]
    assert accepted_answers(10**400) == ["1" + "0" * 400]
    assert accepted_answers(["4", 5, 0.5, Decimal("0.10"), np.int64(3)]) == ["4", "5", "0.5", "0.10", "3"]


@pytest.mark.parametrize("truth", [None, "", " ", [], ["4", None], {"answer": "4"}, [["4"]], float("inf"), b"4"])
def test_what_is_no_answer_is_named(truth: object) -> None:
    with refuses(ValueError, f"ground_truth {truth!r}", "a text, a number, or a list"):
        accepted_answers(truth)
