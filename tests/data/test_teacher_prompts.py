"""Which response or text the teacher of a policy that teaches itself is shown, and how it stands in the prompt."""

from __future__ import annotations

import math
from typing import Any

import pytest

from grpo_dist.data.teacher_prompts import TeacherPrompts
from grpo_dist.plan.commands import load_config
from tests.data.test_tokenize import byte_tokenizer

MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1?"}]
NOTHING = [""] * 4


def prompts(**changes: Any) -> TeacherPrompts:
    forms = {"success_template": "/right: {text}.", "feedback_template": "/said: {text}.", "max_prompt_length": None}
    section = load_config([])[0].algorithm.self_distillation.replaced(**(forms | changes))
    return TeacherPrompts(section, byte_tokenizer(), {"suffix": "~"})


def shown(made: list[list[int]]) -> list[str]:
    """What each response's teacher reads between the question and the answer."""
    texts = [byte_tokenizer().decode(ids) for ids in made]
    assert all(text.startswith("<system>S<user>1+1?") and text.endswith("<assistant>~") for text in texts if text)
    return [text.removeprefix("<system>S<user>1+1?").removesuffix("<assistant>~") for text in texts]


def test_each_response_is_shown_the_next_success_and_never_itself() -> None:
    made = prompts()(MESSAGES, ["a", "b", "c", "d"], [1.0, 0.5, 1.5, math.nan], NOTHING)
    assert shown(made) == ["/right: c.", "/right: c.", "/right: a.", "/right: a."]
    assert MESSAGES[1]["content"] == "1+1?", "the row stands as it is"


@pytest.mark.parametrize(
    ("scores", "threshold", "expected"),
    [
        ([0.0, 0.9, 0.0, 0.0], 1.0, ["", "", "", ""]),
        ([0.0, 1.0, 0.0, 0.0], 1.0, ["/right: b.", "", "/right: b.", "/right: b."]),
        ([0.0, 0.9, 0.0, 0.0], 0.9, ["/right: b.", "", "/right: b.", "/right: b."]),
        ([1.0, 1.0, 1.0, 1.0], None, ["", "", "", ""]),
    ],
)
def test_without_another_success_there_is_nothing_to_show(
    scores: list[float], threshold: float | None, expected: list[str]
) -> None:
    made = prompts(success_threshold=threshold)(MESSAGES, ["a", "b", "c", "d"], scores, NOTHING)
    assert shown(made) == expected


def test_what_was_said_of_a_response_stands_behind_a_success() -> None:
    said = ["no", " ", "", "yes"]
    assert shown(prompts()(MESSAGES, ["a", "b", "c", "d"], [0, 1, 0, 0], said)) == [
        "/right: b./said: no.",
        "",
        "/right: b.",
        "/right: b./said: yes.",
    ]
    assert shown(prompts(success_threshold=None)(MESSAGES, ["a"], [1], ["no {text}"])) == ["/said: no {text}."]


def test_a_prompt_that_would_be_too_long_is_not_shown() -> None:
    longest = len(prompts()(MESSAGES, ["a", "bb"], [0, 1], ["", ""])[0])
    for limit, expected in ((longest, "/right: bb."), (longest - 1, "")):
        made = prompts(max_prompt_length=limit)(MESSAGES, ["a", "bb"], [0, 1], ["", ""])
        assert shown(made) == [expected, ""]


def test_it_stands_behind_the_users_last_message() -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "It"}]
    made = prompts()(begun, ["a", "b"], [0, 1], ["", ""])
    assert byte_tokenizer().decode(made[0]).startswith("<system>S<user>1+1?/right: b.<assistant>It")
    assert prompts()([{"role": "system", "content": "S"}], ["a", "b"], [1, 1], ["", ""]) == [[], []]
