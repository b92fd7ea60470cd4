from fractions import Fraction

import pytest

from grpo_dist.tasks.countdown import compute_score, evaluate, parse_expression
from tests.messages import refuses
from tests.rewards.scoring import scored

TRUTH = {"target": 24, "numbers": [3, 3, 8, 8]}


def answer(expression: str, truth: object = TRUTH, **kwargs: object) -> tuple[float, float, float, float]:
    found = compute_score("countdown", f"<think>hm</think> <answer>{expression}</answer>", truth, {}, **kwargs)
    return found["score"], found["format"], found["numbers"], found["acc"]


@pytest.mark.parametrize(
    "expression",
    ["8 / (3 - 8 / 3)", "8/(3-8/3) = 24", "8 ÷ (3 − 8 ÷ 3)", " \n8/(3-8/3)\n", "--8/(3-(8/3))", "8/(3-8/3) = 99"],
)
def test_right(expression: str) -> None:
    """A float would give 23.999...99; what follows the = is not looked at."""
    assert answer(expression) == (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("expression", "numbers"),
    [
        ("3 + 3 + 8 + 8", 1.0),  # 22
        ("8 * 3", 0.0),  # not all of them
        ("8 * 3 * (8 - 8 + 3 / 3)", 0.0),  # one too often
        ("24", 0.0),
        ("38 - 3 - 8 - 3", 0.0),
        ("8 / (3 - 3) + 8", 1.0),  # division by zero
    ],
)
def test_an_expression_that_is_no_solution(expression: str, numbers: float) -> None:
    assert answer(expression) == (0.1, 1.0, numbers, 0.0)
    assert answer(expression, format_score=0.0)[0] == 0.0


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "twenty-four",
        "8 ** 3",
        "9**9**9**9",
        "8 // 3",
        "8 % 3",
        "0x18",
        "2.4e1",
        "8, 3",
        "(8",
        "8 3",
        "08 + 3",
        "3 == 3",
        "__import__('os')",
        "8 if 3 else 8",
        "(8)(3)",
        "(" * 149 + "8" + ")" * 149,  # too deep for the parser, or fine: either way no error
        "+" * 400 + "8",
    ],
)
def test_what_is_no_expression(expression: str) -> None:
    score, _, _, acc = answer(expression)
    assert (score, acc) in ((0.0, 0.0), (0.1, 0.0))
    if "(((" not in expression:
        assert score == 0.0


def test_the_last_answer_counts_and_outside_of_tags_none_does() -> None:
    good, bad = "<answer>8/(3-8/3)</answer>", "<answer>8+3</answer>"
    assert compute_score("c", good + bad, TRUTH, {})["score"] == 0.1
    assert compute_score("c", bad + good, TRUTH, {})["score"] == 1.0
    assert compute_score("c", "8/(3-8/3)", TRUTH, {})["score"] == 0.0
    assert compute_score("c", "<result>8/(3-8/3)</result>", TRUTH, {}, tag="result")["score"] == 1.0


@pytest.mark.parametrize(
    "truth",
    [
        *(None, 24, "24", {}, {"target": 24}, {"target": 24, "numbers": []}, {"target": "24", "numbers": [24]}),
        *({"target": 24, "numbers": [True]}, {"target": 24, "numbers": 24}),
    ],
)
def test_a_broken_truth_is_an_error(truth: object) -> None:
    with refuses(ValueError, '{"target": integer, "numbers": '):
        answer("24", truth)


def test_values_are_exact() -> None:
    for text, value in (("1/3+1/3+1/3", 1), ("-2*(3-5)", 4), ("7/2", Fraction(7, 2)), ("1-2-3", -4)):
        tree = parse_expression(text)
        assert tree is not None
        assert evaluate(tree) == value


def test_built_in() -> None:
    for target, earned in ((24, 1.0), (25, 0.1)):
        assert scored("<answer>8/(3-8/3)</answer>", TRUTH | {"target": target}, "countdown").score == earned
