"""The tag format: exact, and nothing for what only looks like it."""

import time
from decimal import Decimal

import numpy as np
import pytest

from grpo_dist.rewards.format import accepted_answers, compute_score, contains, last_tag_content, tag_contents
from tests.messages import refuses


def score(text: str, truth: object = "4", **kwargs: object) -> dict[str, float]:
    return compute_score("any", text, truth, {}, **kwargs)  # type: ignore[arg-type]


def test_right_format_and_right_or_wrong_answer() -> None:
    for text in (
        "\n<think>\n2 < 3 > 1\n</think>\n\n<answer> 4 </answer>\n",
        "<think>é両🎉 <b>bold</b></think><answer>4</answer>",
    ):
        assert score(text) == {"score": 1.0, "format": 1.0, "acc": 1.0}
    text = "<think>4</think><answer>5</answer>"
    assert score(text) == {"score": 0.1, "format": 1.0, "acc": 0.0}
    assert [score(text, format_score=each)["score"] for each in (0.0, 1.0)] == [0.0, 1.0]


def test_wrong_format_earns_nothing() -> None:
    for text in (
        "",
        "garbage <think> </answer>",
        "<answer>4</answer>",
        "<answer>4</answer><think>x</think>",  # order
        "<think>x<answer>4</answer></think>",  # nested
        "<think>x</think><answer>4",  # not closed
        "x</think><answer>4</answer>",
        "<think></think><answer>4</answer>",  # empty
        "<think>x</think><answer> \n </answer>",
        "Sure! <think>x</think><answer>4</answer>",  # text around
        "<think>x</think><answer>4</answer> bye",
        "<think>x</think><answer>5</answer><answer>4</answer>",  # twice
        "<think>x</think><think>y</think><answer>4</answer>",
        "<Think>x</Think><Answer>4</Answer>",
        "<think >x</think><answer>4</answer>",
    ):
        assert score(text) == {"score": 0.0, "format": 0.0, "acc": 0.0}


def test_other_tags_and_bad_tags() -> None:
    assert tag_contents("<a>1</a> <b>2</b><c.d>3</c.d>", ("a", "b", "c.d")) == ["1", "2", "3"]
    assert tag_contents("<a>1</a><b>2</b><cxd>3</cxd>", ("a", "b", "c.d")) is None
    assert score("<plan>x</plan>", "x", tags=["plan"])["score"] == 1.0
    for tags in ([], "think", ["a", "a"]):
        with refuses(ValueError, "reward_kwargs.tags"):
            score("<a>4</a>", tags=tags)


def test_the_last_complete_tag() -> None:
    assert last_tag_content("<a>1</a> <a> 2 </a> <a>3", "a") == "2"
    assert [last_tag_content(text, "a") for text in ("1</a>", "<a>1", "1")] == [None] * 3


def test_the_tag_that_the_prompt_opened() -> None:
    assert score("x</think><answer>4</answer>", opened="think") == {"score": 1.0, "format": 1.0, "acc": 1.0}
    assert score("<think>x</think><answer>4</answer>", opened="think")["score"] == 0.0, "twice"
    assert score("<answer>4</answer>", opened="think")["score"] == 0.0
    with refuses(ValueError, "reward_kwargs.opened='answer'", "'think'"):
        score("4</answer>", opened="answer")


def test_repeated_tags_take_no_time() -> None:
    start = time.process_time()
    for text in ("<think>" * 50_000, "<think>a" + "</think>\n<answer> " * 20_000, "<think>x</think>" + " " * 300_000):
        assert tag_contents(text, ("think", "answer")) is None
    assert time.process_time() - start < 10


def test_truths() -> None:
    text = "<think>a</think><answer>4</answer>"
    assert [score(text, truth)["acc"] for truth in (4, "4", ["5", "4"], ["5"])] == [1.0, 1.0, 1.0, 0.0]
    with refuses(ValueError, "ground_truth {'target': 4}", "a text, a number, or a list"):
        score(text, {"target": 4})
    assert score(text, {"target": 4}, format_score=1)["score"] == 1.0, "the answer does not matter"
    assert accepted_answers(" 4 ") == ["4"]
    assert accepted_answers(10**400) == ["1" + "0" * 400]
    assert accepted_answers(["4", 5, 0.5, Decimal("0.10"), np.int64(3)]) == ["4", "5", "0.5", "0.10", "3"]


@pytest.mark.parametrize("truth", [None, "", " ", [], ["4", None], {"answer": "4"}, [["4"]], float("inf"), b"4"])
def test_what_is_no_answer_is_named(truth: object) -> None:
    with refuses(ValueError, f"ground_truth {truth!r}", "a text, a number, or a list"):
        accepted_answers(truth)


def test_contains() -> None:
    """Whole words and whole numbers."""
    found = {
        "cat": ["a cat"], "2.5": ["2.5"], "1,000": ["1,000"], "200": ["3, 200"], "(5)": ["(5)"],
        "5": ["3,5,7", "v.5", "x/5", "5, and no more", "it is 5.", "5...7", "2+3=5", "5% of it"],
        "5 apples": ["5 apples"],
    }  # fmt: skip
    not_found = {
        "cat": ["cats"], "2.5": ["12.5", "2.51"], "5 apples": ["2.5 apples"], "1": ["1,000 people"],
        "1,000": ["1,000,000"], "000": ["1,000,000"], "30": ["at 10:30"], "5": ["1/5 of it", "2^5", "5e3", ""],
    }  # fmt: skip
    for part, texts in found.items():
        assert [text for text in texts if not contains(text, part)] == [], part
    for part, texts in not_found.items():
        assert [text for text in texts if contains(text, part)] == [], part
