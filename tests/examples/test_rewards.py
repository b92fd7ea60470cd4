"""The reward functions of examples/rewards, which a user names or copies."""

from pathlib import Path
from typing import Any

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.rewards import load_reward_function
from tests.messages import refuses
from tests.rewards.scoring import scored

FOLDER = Path(__file__).parents[2] / "examples" / "rewards"
graded, length_penalty, multiple_choice, xml_tags = (
    load_attribute(f"{FOLDER / name}.py:compute_score", key="path")
    for name in ("graded", "length_penalty", "multiple_choice", "xml_tags")
)
penalty_share = load_attribute(f"{FOLDER / 'length_penalty.py'}:penalty_share", key="path")
extract_choice = load_attribute(f"{FOLDER / 'multiple_choice.py'}:extract_choice", key="path")


# --- graded: exact, the same number, a part, or wrong ----------------------------------------------------------------
TINY = {"exact": 1.0, "numeric": 0.5, "partial": 0.5, "wrong": 0.01}


def grade(text: str, truth: object = "1000", **kwargs: object) -> tuple[float, float]:
    result = graded("d", text, truth, {}, **kwargs)
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
    assert grade(text, tag="answer") == (demo, demo > 0)
    assert grade(text, tag="answer", **TINY)[0] == tiny


def test_without_a_tag_the_response_is_the_answer() -> None:
    assert [grade(" 1000\n"), grade("nan", "nan")] == [(2.0, 1.0)] * 2
    assert [grade("$1,000."), grade("about 6", ["5", "6"])] == [(1.5, 1.0)] * 2
    assert grade("Paris", "paris") == (0.0, 0.0)
    for truth in ("", None, {"answer": 6}):
        with refuses(ValueError, f"ground_truth {truth!r}", "no answer"):
            grade("anything", truth)


def test_a_part_is_a_whole_number() -> None:
    found = [grade(text, "6", partial=0.5)[0] for text in ("6 or 7", "2.6 or 7", "6,000 or 7", "16 or 7")]
    assert found == [0.5, 0.0, 0.0, 0.0]


RIGHT = [("6 apples", "6"), ("6", "6 apples"), ("There are 6.0 apples.", "6"), ("$6.", 6), ("6%", "6"), ("−6 °C", "-6"),
         ("1e3 g", "1000"), ("1,234,567 people", "1234567")]  # fmt: skip
WRONG = [("-6 apples", "6"), ("16 apples", "6"), ("10-4", "6"), ("6/12", "6"), ("six", "6"),
         ("6 apples and 7 pears", "6"), ("6 and 6", "6"),  # not a single number
         ("6 apples", "6 of 12"),  # the truth has two
         ("1" * 400, "2" * 400)]  # as floats both would be infinite  # fmt: skip


@pytest.mark.parametrize(("score", "rows"), [(1.5, RIGHT), (0.0, WRONG)])
def test_the_only_number_counts_whatever_stands_around_it(score: float, rows: list[tuple[str, object]]) -> None:
    assert [row for row in rows if grade(*row) != (score, float(score > 0))] == []


# --- length_penalty ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("length", "linear", "cosine"),
    [(0, 0.0, 0.0), (10, 0.0, 0.0), (12, 0.25, 0.14644661), (14, 0.5, 0.5), (18, 1.0, 1.0), (99, 1.0, 1.0)],
)
def test_penalty_share(length: int, linear: float, cosine: float) -> None:
    assert penalty_share(length, 10, 18) == linear
    assert penalty_share(length, 10, 18, "cosine") == pytest.approx(cosine)
    found = length_penalty("d", "x" * length, "", {}, budget=10, limit=18, unit="characters", shape="cosine")
    assert found == {"score": pytest.approx(-cosine), "length": float(length)}


def test_with_a_reward_by_weighted() -> None:
    penalty = {"path": str(FOLDER / "length_penalty.py"), "weight": 0.5, "reward_kwargs": {"budget": 2, "limit": 4}}
    functions = {"functions": [{"path": None, "label": "right"}, penalty]}
    function = load_reward_function("grpo_dist.rewards.weighted", "compute_score", functions)
    result = scored("so #### 4", "4", "gsm8k", function=function)
    parts = {"right": 1.0, "right.acc": 1.0, "length_penalty": -0.5, "length_penalty.length": 3.0}
    assert (result.score, result.extra) == (1.0 - 0.5 * 0.5, {"acc": 1.0, **parts})


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"limit": 4}, ["missing", "'budget'"]),
        ({"budget": 4, "limit": 4}, ["limit=4", "budget=4"]),
        ({"budget": -1, "limit": 4}, ["budget=-1", "words", "0"]),
        ({"budget": 1.5, "limit": 4}, ["budget=1.5"]),
        ({"budget": 1, "limit": 4, "unit": "tokens"}, ["unit='tokens'", "words, characters"]),
        ({"budget": 1, "limit": 4, "shape": "step"}, ["shape='step'", "linear, cosine"]),
    ],
)
def test_the_lengths_arguments_are_checked_before_the_run(kwargs: dict[str, Any], words: list[str]) -> None:
    with refuses(ConfigError, *words):
        load_reward_function(str(FOLDER / "length_penalty.py"), "compute_score", kwargs)


# --- multiple_choice -------------------------------------------------------------------------------------------------
CHOSEN = {
    "A": [
        "Answer: A, E", "The answer is A because B is wrong", "The answer is A, because B is wrong",
        "The answer is A, not B",
    ],
    "B": [
        "<answer>B</answer>", "<answer> (b) Paris </answer>", r"so \boxed{B}", r"so \boxed{\text{B}}", "**B**",
        r"\boxed{\textbf{(B)}\ 12}", "Answer: B", "answer: b", "**Answer:** B. Paris", "**Answer: B**", "B", " b. ",
        "Answer:\n(B)", "The correct answer is (B) because A is wrong.", "The answer is A. No: the answer is B.",
        "Answer: A <answer>B</answer>",  # the clearest place
        "<answer>no idea</answer> Answer: B", "The answer is B. That answer is correct.",
        # what follows a letter may be its text, or say why
        "Answer: B. Paris is the capital", "Answer: B) Paris or London", "Answer: B - Paris", "Answer: B, a dog",
        "Answer: B. A dog and a cat", "Answer: B - A dog", "Answer: B. C", "Answer: B or (B)", "(B) or (B)",
        "The answer is B; A is wrong", "The answer is B. A is wrong", "The answer is B. Option A is wrong",
        "Answer: B\nA is wrong since it is a dog", "Answer: B\n\nExplanation:\nA\nC", "<answer>B\nA is wrong</answer>",
        "Answer: " + "B".ljust(79) + "\nA because",  # the place ends within a line
    ],
    "C": [
        "The right choice is: C", "(A) is not it. It must be (C).", r"\boxed{C}",
        "Options: (A) (B) (C). I choose (C)",
    ],
    "D": [
        "(D)", "Answer: D. A and B", "Answer: (D) A and B", "Answer: D: A, B and C", "Answer: D - A and B only",
    ],
    None: [
        "", "E", "Answer: E", "B it is", "A good question. Be brief.", "The answer is a dog", "The answer is Done",
        # several letters are no choice
        "Answer: A or B", "Answer: A, B", "<answer>A/B/C/D</answer>", "Answer: (A) and (B)", "Answer: A; B; C; D",
        "Answer: A - B - C", "Answer: A – B", "Answer: A | B", "Answer: A B C D", "Answer: A. B. C. D.",
        "Answer: A) B) C)", "Answer: (A), (B)", "Answer:\nA\nB\nC\nD", "Answer:\n- A\n- B", "Answer: A\n\n**B**\n",
        "Answer: A, or B", "Answer: A or maybe B", "Answer: A or option B", "Answer: A and/or (B)", "answer: a or b",
        "The answer is A or B is right", "(B) or (A)", "It is (B), (A).", "(A) (B) (C) (D)", "(A)\n(B)",
        "<answer>A\nB\nC</answer>", "<answer>\n(A)\n(B)\n</answer> Answer: A", r"\boxed{A, B}",
        r"\boxed{\text{A} \text{ or } \text{B}}",
    ],
}  # fmt: skip


@pytest.mark.parametrize("letter", CHOSEN)
def test_the_choice_that_a_text_makes(letter: str | None) -> None:
    assert {text: extract_choice(text, "ABCD") for text in CHOSEN[letter]} == dict.fromkeys(CHOSEN[letter], letter)


def test_scores_of_choices() -> None:
    assert multiple_choice("d", "Answer: B", "B", {}) == {"score": 1.0, "format": 1.0, "acc": 1.0, "pred": "B"}
    assert multiple_choice("d", "Answer: B", "(b)", {})["score"] == 1.0
    wrong = multiple_choice("d", "Answer: C", "B", {}, format_score=0.1)
    assert wrong == {"score": 0.1, "format": 1.0, "acc": 0.0, "pred": "C"}
    assert multiple_choice("d", "who knows", "B", {}, format_score=0.1)["score"] == 0.0
    assert multiple_choice("d", "Answer: E", "E", {}, choices="ABCDE")["score"] == 1.0


@pytest.mark.parametrize("truth", ["E", "", "AB", None, 1, "Paris"])
def test_a_truth_that_is_no_choice_is_an_error(truth: object) -> None:
    with refuses(ValueError, f"ground_truth {truth!r}", "'ABCD'"):
        multiple_choice("d", "Answer: A", truth, {})


@pytest.mark.parametrize("choices", ["", "AA", "A,B", 4])
def test_choices_must_be_letters(choices: object) -> None:
    with refuses(ConfigError, "reward_kwargs.choices=", "different letters"):
        load_reward_function(str(FOLDER / "multiple_choice.py"), "compute_score", {"choices": choices})


# --- xml_tags --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("<think>a</think><answer>b</answer>", 4),
        ("<think>a</think>", 2),
        ("<think>a</think></think>", 1),  # the closing tag twice
        ("</answer>", 1),
        ("think answer", 0),
    ],
)
def test_each_tag_counts_once(text: str, tags: int) -> None:
    assert xml_tags("d", text, None, {}) == pytest.approx(0.2 * tags)
    assert xml_tags("d", text, None, {}, per_tag=1.0) == tags
    assert xml_tags("d", text.removeprefix("<think>"), None, {}, per_tag=1.0, opened="think") >= tags
    with refuses(ValueError, "tags='think'"):
        xml_tags("d", text, None, {}, tags="think")
