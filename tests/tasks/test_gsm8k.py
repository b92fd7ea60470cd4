"""Strict pays for the last `#### NUMBER` and for nothing else, flexible for the last number."""

import time
from typing import Any

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.rewards import load_reward_function
from grpo_dist.tasks.gsm8k import compute_score
from tests.messages import refuses

RIGHT = r"""
4: 2 + 2 = 4\n#### 4 | #### 4 apples | #### 4<|im_end|> | #### 3\nNo, wait.\n#### 4 | #### 3 #### 4 | 答えは\n#### 4 🎉
4: #### 4\n#### none
5: #### 5 (2 + 3) | #### 5 - that is all
18: #### 18. | #### 18, as asked | #### $18 | #### +18 | #### $+18 | #### 18-year-olds
+18: #### 18
-5: #### -5 | #### -$5 | #### $-5 | #### −5 | #### –$5
−5: #### -5
50: #### 50%
0.5: #### 0.5
.5: #### .5
70000: #### 70,000
70,000: #### 70000
1234567.50: #### 1,234,567.50,
"""
WRONG = r"""
4: asdf ;;; 0x | The answer is 4 | 4\n#### | 4 #### | #### four | ####4 | ####  4 | ### 4 | # # # # 4 | #### x = 4
4: #### 5\nThe answer is 4 | #### 4\n#### 5 | #### 4 #### 5 | #### 4/2 | #### 4-7 | #### 4–7 | #### 4e3 | #### 4^2
4: #### 4:30 | #### −4 | #### 4.. | #### --4 | #### -$-4 | #### -4 | #### 44 | #### 4.0 | #### 04 | #### . | #### ,
4: #### $ | #### ４ | #### ٤ | #### 4\n#### ...
-4: #### 4
5: #### 4 | #### 5 / 7 | #### 5 1/2 | #### 5½ | #### 5² | #### 5 - 3 | #### 5 × 3 | #### 5 million | #### $5k
5: #### 5 and a half | #### 5\frac{1}{2}
1: #### 14/2 | #### 1 000
4.5: #### 4.5.6
35: #### 3,5
123: #### 1,2,3
"""
FLEXIBLE = r"""
4: The answer is 4 | #### 4 | x = 10-4 | so +4 | 3, 4 | 04
-4: so -4 | so −4
-5: -$5
0.5: .5 litres
1000: It costs $1,000.00.
"""


def rows(table: str) -> list[tuple[str, str]]:
    r"""Texts and truths of lines `TRUTH: TEXT | TEXT`; `\n` is a line's end."""
    lines = [line.partition(": ") for line in table.strip().splitlines()]
    return [(text.replace(r"\n", "\n"), truth) for truth, _, texts in lines for text in texts.split(" | ")]


def score(text: str, truth: Any, **options: Any) -> float:
    return compute_score("gsm8k", text, truth, {}, **options)["score"]


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        *(*rows(RIGHT), ("#### 4", 4), ("#### 4", 4.0), ("#### 4", " 4 "), ("#### 0.5", 0.5)),
        ("#### 4" + " and so on" * 200, "4"),  # verl would not look so far back
    ],
)
def test_right(text: str, truth: Any) -> None:
    assert score(text, truth) == 1.0


@pytest.mark.parametrize(("text", "truth"), [("", "4"), *rows(WRONG)])
def test_wrong(text: str, truth: str) -> None:
    """The number elsewhere, no space, another one last, only a beginning, and what goes on behind; as text, as verl."""
    assert score(text, truth) == 0.0


@pytest.mark.parametrize("truth", ["", "four", None, "#### 4", float("nan"), float("inf"), True, ["4"]])
def test_a_ground_truth_that_is_no_number_is_not_paid_silently(truth: Any) -> None:
    with refuses(ValueError, f"ground_truth {truth!r}", "number"):
        score("#### 4", truth)


@pytest.mark.parametrize("text", ["#### " * 100_000, "#### 1" * 100_000, "#### " + "1," * 200_000, "#" * 400_000])
def test_long_garbage_takes_no_time(text: str) -> None:
    start = time.process_time()
    assert score(text, "4") == 0.0
    assert time.process_time() - start < 10


def test_votes_formats_and_methods() -> None:
    for text, pred, right in (("#### 1,000.", "1000", 1), ("#### 7", "7", 0), ("1000", None, 0)):
        assert compute_score("gsm8k", text, "1000", {}) == {"score": right, "acc": right, "pred": pred}
    assert score("#### 5", "4", format_score=0.1) == 0.1
    assert score("It is 4", "4", format_score=0.1) == 0.0
    with refuses(ConfigError, "reward_kwargs.method='lenient'", "strict, flexible"):
        load_reward_function("grpo_dist.tasks.gsm8k", "compute_score", {"method": "lenient"})


def test_flexible() -> None:
    for text, truth in rows(FLEXIBLE):
        assert score(text, truth, method="flexible", format_score=0.25) == 1.0, text
    for text, truth in (("so −4", "4"), ("x = 10-4", "-4"), ("4, not 5", "4"), ("3,4", "34")):
        assert score(text, truth, method="flexible", format_score=0.25) == 0.25, text
    for text in ("four", ""):
        assert score(text, "4", method="flexible", format_score=0.25) == 0.0, text
