from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.rewards import load_reward_function
from tests.messages import refuses

PATH = str(Path(__file__).parents[2] / "examples" / "rewards" / "multiple_choice.py")
compute_score = load_attribute(f"{PATH}:compute_score", key="path")
extract_choice = load_attribute(f"{PATH}:extract_choice", key="path")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("<answer>B</answer>", "B"),
        ("<answer> (b) Paris </answer>", "B"),
        (r"so \boxed{B}", "B"),
        (r"so \boxed{\text{B}}", "B"),
        (r"\boxed{\textbf{(B)}\ 12}", "B"),
        ("Answer: B", "B"),
        ("answer: b", "B"),
        ("**Answer:** B. Paris", "B"),
        ("**Answer: B**", "B"),
        ("Answer:\n(B)", "B"),
        ("The correct answer is (B) because A is wrong.", "B"),
        ("The answer is A. No: the answer is B.", "B"),
        ("The right choice is: C", "C"),
        ("(A) is not it. It must be (C).", "C"),
        ("B", "B"),
        (" b. ", "B"),
        ("Answer: A <answer>B</answer>", "B"),  # the clearest place
        ("<answer>no idea</answer> Answer: B", "B"),
        ("The answer is B. That answer is correct.", "B"),
        ("", None),
        ("E", None),
        ("Answer: E", None),
        ("B it is", None),
        ("A good question. Be brief.", None),
        ("The answer is a dog", None),
        ("The answer is Done", None),
        ("Answer: A or B", None),
        ("Answer: A, B", None),
        ("<answer>A/B/C/D</answer>", None),
        ("Answer: (A) and (B)", None),
    ],
)
def test_extract_choice(text: str, letter: str | None) -> None:
    assert extract_choice(text, "ABCD") == letter


@pytest.mark.parametrize(
    "text",
    [
        "Answer: A; B; C; D",
        "Answer: A - B - C",
        "Answer: A – B",
        "Answer: A | B",
        "Answer: A B C D",
        "Answer: A. B. C. D.",
        "Answer: A) B) C)",
        "Answer: (A), (B)",
        "Answer:\nA\nB\nC\nD",
        "Answer:\n- A\n- B",
        "Answer: A\n\n**B**\n",
        "Answer: A, or B",
        "Answer: A or maybe B",
        "Answer: A or option B",
        "Answer: A and/or (B)",
        "answer: a or b",
        "The answer is A or B is right",
        "(B) or (A)",
        "It is (B), (A).",
        "(A) (B) (C) (D)",
        "(A)\n(B)",
        "<answer>A\nB\nC</answer>",
        "<answer>\n(A)\n(B)\n</answer> Answer: A",
        r"\boxed{A, B}",
        r"\boxed{\text{A} \text{ or } \text{B}}",
    ],
)
def test_several_letters_are_no_choice(text: str) -> None:
    assert extract_choice(text, "ABCD") is None


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("**B**", "B"),
        (r"\boxed{C}", "C"),
        ("(D)", "D"),
        ("Answer: B. Paris is the capital", "B"),
        ("Answer: B) Paris or London", "B"),
        ("Answer: B - Paris", "B"),
        ("Answer: B, a dog", "B"),
        ("Answer: B. A dog and a cat", "B"),
        ("Answer: B - A dog", "B"),
        ("Answer: D. A and B", "D"),
        ("Answer: (D) A and B", "D"),
        ("Answer: D: A, B and C", "D"),
        ("Answer: D - A and B only", "D"),
        ("Answer: B. C", "B"),  # the text of an option
        ("Answer: B or (B)", "B"),
        ("(B) or (B)", "B"),
        ("Answer: A, E", "A"),  # E is no choice
        ("The answer is A because B is wrong", "A"),
        ("The answer is A, because B is wrong", "A"),
        ("The answer is A, not B", "A"),
        ("The answer is B; A is wrong", "B"),
        ("The answer is B. A is wrong", "B"),
        ("The answer is B. Option A is wrong", "B"),
        ("Answer: B\nA is wrong since it is a dog", "B"),
        ("Answer: B\n\nExplanation:\nA\nC", "B"),
        ("Answer: " + "B".ljust(79) + "\nA because", "B"),  # the place ends within a line
        ("Options: (A) (B) (C). I choose (C)", "C"),
        ("<answer>B\nA is wrong</answer>", "B"),
    ],
)
def test_what_follows_a_letter_may_be_its_text(text: str, letter: str) -> None:
    assert extract_choice(text, "ABCD") == letter


def test_scores() -> None:
    assert compute_score("d", "Answer: B", "B", {}) == {"score": 1.0, "format": 1.0, "acc": 1.0, "pred": "B"}
    assert compute_score("d", "Answer: B", "(b)", {})["score"] == 1.0
    wrong = compute_score("d", "Answer: C", "B", {}, format_score=0.1)
    assert wrong == {"score": 0.1, "format": 1.0, "acc": 0.0, "pred": "C"}
    assert compute_score("d", "who knows", "B", {}, format_score=0.1)["score"] == 0.0
    assert compute_score("d", "Answer: E", "E", {}, choices="ABCDE")["score"] == 1.0


@pytest.mark.parametrize("truth", ["E", "", "AB", None, 1, "Paris"])
def test_a_truth_that_is_no_choice_is_an_error(truth: object) -> None:
    with refuses(ValueError, f"ground_truth {truth!r}", "'ABCD'"):
        compute_score("d", "Answer: A", truth, {})


@pytest.mark.parametrize("choices", ["", "AA", "A,B", 4, ["A"]])
def test_choices_must_be_letters(choices: object) -> None:
    with refuses(ConfigError, "reward_kwargs.choices=", "different letters"):
        load_reward_function(PATH, "compute_score", {"choices": choices})
