from pathlib import Path

import pytest

from grpo_dist.plugins.registry import load_attribute
from tests.messages import refuses

PATH = str(Path(__file__).parents[2] / "examples" / "rewards" / "graded.py")
compute_score = load_attribute(f"{PATH}:compute_score", key="path")

TINY = {"exact": 1.0, "numeric": 0.5, "partial": 0.5, "wrong": 0.01}


def grade(text: str, truth: object = "1000", **kwargs: object) -> tuple[float, float]:
    result = compute_score("d", text, truth, {}, **kwargs)
    return result["score"], result["acc"]


@pytest.mark.parametrize(
    ("text", "demo", "tiny"),
    [
        ("<answer> 1000 </answer>", 2.0, 1.0),
        ("<answer>999</answer> no: <answer>1,000.0</answer>", 1.5, 0.5),
        ("<answer>about 1000 apples</answer>", 1.5, 0.5),
        ("<answer>1000 of 2000</answer>", 0.0, 0.5),
        ("<answer>999</answer>", 0.0, 0.01),
        ("1000", 0.0, 0.01),  # not in the tag
        ("<answer>1000", 0.0, 0.01),
        ("", 0.0, 0.01),
    ],
)
def test_both_scales(text: str, demo: float, tiny: float) -> None:
    assert grade(text, tag="answer")[0] == demo
    assert grade(text, tag="answer", **TINY)[0] == tiny
    assert grade(text, tag="answer")[1] == (demo > 0)


def test_without_a_tag_the_response_is_the_answer() -> None:
    assert grade(" 1000\n") == (2.0, 1.0)
    assert grade("$1,000.") == (1.5, 1.0)
    assert grade("nan", "nan") == (2.0, 1.0)
    assert grade("Paris", "paris") == (0.0, 0.0)
    assert grade("about 6", ["5", "6"]) == (1.5, 1.0)
    for truth in ("", None, {"answer": 6}):
        with refuses(ValueError, f"ground_truth {truth!r}", "no answer"):
            grade("anything", truth)


@pytest.mark.parametrize(("text", "part"), [("6 or 7", 0.5), ("2.6 or 7", 0.0), ("6,000 or 7", 0.0), ("16 or 7", 0.0)])
def test_a_part_is_a_whole_number(text: str, part: float) -> None:
    assert grade(text, "6", partial=0.5) == (part, 0.0)


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("6", "6", 2.0),
        ("6 apples", "6", 1.5),
        ("6", "6 apples", 1.5),
        ("There are 6.0 apples.", "6", 1.5),
        ("$6.", 6, 1.5),
        ("6%", "6", 1.5),
        ("−6 °C", "-6", 1.5),
        ("1e3 g", "1000", 1.5),
        ("1,234,567 people", "1234567", 1.5),
        ("-6 apples", "6", 0.0),
        ("16 apples", "6", 0.0),
        ("6 apples and 7 pears", "6", 0.0),  # not a single number
        ("6 and 6", "6", 0.0),
        ("10-4", "6", 0.0),
        ("6/12", "6", 0.0),
        ("six", "6", 0.0),
        ("6 apples", "6 of 12", 0.0),  # the truth has two
        ("1" * 400, "2" * 400, 0.0),  # as floats both would be infinite
    ],
)
def test_the_only_number_counts_whatever_stands_around_it(text: str, truth: object, score: float) -> None:
    assert grade(text, truth) == (score, float(score > 0))
