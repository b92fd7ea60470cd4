"""Strict pays for the last `#### NUMBER` and for nothing else, flexible for the last number."""

from __future__ import annotations

import time
from typing import Any

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.rewards import load_reward_function
from grpo_dist.tasks.gsm8k import compute_score, extract_answer
from tests.messages import refuses


def score(text: str, truth: Any) -> float:
    return compute_score(data_source="gsm8k", solution_str=text, ground_truth=truth, extra_info={})["score"]


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("2 + 2 = 4\n#### 4", "4"),
        ("#### 18.", "18"),
        ("#### 18, as asked", "18"),
        ("#### 70,000", "70000"),
        ("#### 70000", "70,000"),
        ("#### $18", "18"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### -5", "-5"),
        ("#### \u22125", "-5"),
        ("#### -5", "\u22125"),
        ("#### \u2013$5", "-5"),
        ("#### +18", "18"),
        ("#### 18", "+18"),
        ("#### $+18", "18"),
        ("#### 18-year-olds", "18"),
        ("#### 50%", "50"),
        ("#### 5 (2 + 3)", "5"),
        ("#### 5 - that is all", "5"),
        ("#### 1,234,567.50,", "1234567.50"),
        ("#### 0.5", "0.5"),
        ("#### .5", ".5"),
        ("#### 4 apples", "4"),
        ("#### 4<|im_end|>", "4"),
        ("#### 4\n#### none", "4"),  # the last one with a number
        ("#### 3\nNo, wait.\n#### 4", "4"),
        ("#### 3 #### 4", "4"),
        ("#### 4" + " and so on" * 200, "4"),  # verl would not look so far back
        ("答えは\n#### 4 🎉", "4"),
        ("#### 4", 4),
        ("#### 4", 4.0),
        ("#### 0.5", 0.5),
        ("#### 4", " 4 "),
    ],
)
def test_right(text: str, truth: Any) -> None:
    assert score(text, truth) == 1.0


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("", "4"),
        ("asdf ;;; 0x", "4"),
        ("The answer is 4", "4"),  # the number elsewhere
        ("4\n####", "4"),
        ("4 ####", "4"),
        ("#### four", "4"),
        ("####4", "4"),  # no space
        ("####  4", "4"),
        ("### 4", "4"),
        ("# # # # 4", "4"),
        ("#### x = 4", "4"),
        ("#### 5\nThe answer is 4", "4"),
        ("#### 4\n#### 5", "4"),  # the last one counts
        ("#### 4 #### 5", "4"),
        ("#### 4.5.6", "4.5"),
        ("#### 4/2", "4"),  # only the beginning is the number
        ("#### 14/2", "1"),
        ("#### 4-7", "4"),
        ("#### 4\u20137", "4"),
        ("#### 4e3", "4"),
        ("#### 4^2", "4"),
        ("#### 4:30", "4"),
        ("#### \u22124", "4"),
        ("#### 4..", "4"),
        ("#### --4", "4"),
        ("#### -$-4", "4"),
        ("#### -4", "4"),
        ("#### 4", "-4"),
        # what goes on behind the number
        ("#### 5 / 7", "5"),
        ("#### 5 1/2", "5"),
        ("#### 5½", "5"),
        ("#### 5²", "5"),
        ("#### 5 - 3", "5"),
        ("#### 5 × 3", "5"),
        ("#### 5 million", "5"),
        ("#### $5k", "5"),
        ("#### 5 and a half", "5"),
        (r"#### 5\frac{1}{2}", "5"),
        ("#### 1 000", "1"),
        ("#### 3,5", "35"),
        ("#### 1,2,3", "123"),
        ("#### 44", "4"),
        ("#### 4.0", "4"),  # compared as text, as verl does
        ("#### 04", "4"),
        ("#### .", "4"),
        ("#### ,", "4"),
        ("#### $", "4"),
        ("#### ４", "4"),  # a full-width digit
        ("#### ٤", "4"),
        ("#### 4", "5"),
    ],
)
def test_wrong(text: str, truth: Any) -> None:
    assert score(text, truth) == 0.0


@pytest.mark.parametrize("truth", ["", "four", None, "#### 4", float("nan"), float("inf"), True, ["4"]])
def test_a_ground_truth_that_is_no_number_is_not_paid_silently(truth: Any) -> None:
    with refuses(ValueError, f"ground_truth {truth!r}", "number"):
        score("#### 4", truth)


def test_extract_answer() -> None:
    assert extract_answer("a #### 1,234.50 b") == "1234.50"
    assert extract_answer("#### 1\n#### 2.") == "2"
    assert extract_answer("none") is None
    assert extract_answer("#### 1\n#### ...") is None


@pytest.mark.parametrize("text", ["#### " * 100_000, "#### 1" * 100_000, "#### " + "1," * 200_000, "#" * 400_000])
def test_long_garbage_takes_no_time(text: str) -> None:
    start = time.process_time()
    assert score(text, "4") == 0.0
    assert time.process_time() - start < 10


@pytest.mark.parametrize(("text", "pred", "right"), [("#### 1,000.", "1000", 1), ("#### 7", "7", 0), ("1000", None, 0)])
def test_the_answer_is_returned_for_the_vote(text: str, pred: str | None, right: int) -> None:
    result = compute_score(data_source="gsm8k", solution_str=text, ground_truth="1000", extra_info={})
    assert result == {"score": right, "acc": right, "pred": pred}


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("The answer is 4", "4", 1.0),
        ("#### 4", "4", 1.0),
        ("It costs $1,000.00.", "1000", 1.0),
        ("x = 10-4", "4", 1.0),
        ("so -4", "-4", 1.0),
        ("-$5", "-5", 1.0),
        ("so \u22124", "-4", 1.0),
        ("so +4", "4", 1.0),
        ("so \u22124", "4", 0.25),
        (".5 litres", "0.5", 1.0),
        ("3, 4", "4", 1.0),
        ("04", "4", 1.0),
        ("x = 10-4", "-4", 0.25),
        ("4, not 5", "4", 0.25),
        ("3,4", "34", 0.25),
        ("four", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_flexible(text: str, truth: str, expected: float) -> None:
    assert compute_score("gsm8k", text, truth, {}, method="flexible", format_score=0.25)["score"] == expected


def test_format_score_is_for_an_answer_in_the_right_place() -> None:
    assert compute_score("gsm8k", "#### 5", "4", {}, format_score=0.1)["score"] == 0.1
    assert compute_score("gsm8k", "It is 4", "4", {}, format_score=0.1)["score"] == 0.0


def test_another_method_is_refused_before_the_run() -> None:
    with refuses(ConfigError, "reward_kwargs.method='lenient'", "strict, flexible"):
        load_reward_function("grpo_dist.tasks.gsm8k", "compute_score", {"method": "lenient"})
