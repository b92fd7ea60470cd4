"""Which response or text the teacher of a policy that teaches itself is shown, and how it stands in the prompt."""

import math
from typing import Any

import torch

from grpo_dist.plan.commands import load_config
from grpo_dist.protocol import Ragged
from grpo_dist.workers.scorer import Task, TeacherPrompts
from tests.data.test_tokenize import byte_tokenizer

MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1?"}]
ROW: Any = (MESSAGES, {})
FOUR = ["a", "b", "c", "d"]


def made(texts: list, scores: list, said: list[str] | None = None, row: Any = ROW, **changes: Any) -> list[list[int]]:
    """The prompts of a group, whose responses are of one token each."""
    forms = {"success_template": "/right: {text}.", "feedback_template": "/said: {text}.", "longest_prompt": None}
    section = load_config([])[0].algorithm.self_distillation.replaced(**(forms | changes))
    told = [{"judge": text} if text else {} for text in said or [""] * len(texts)]
    of, task = Ragged.from_rows([[5]] * len(texts), torch.int32), Task("d", "2", row[1], row[0], is_plain=len(row) > 2)
    columns = TeacherPrompts(section, byte_tokenizer(), {"suffix": "~"}).columns(task, texts, scores, told, of)
    prompts = [prompt.tolist() for prompt in columns["teacher_prompts"].rows()]
    assert columns["teacher_mask"].values.tolist() == [float(bool(prompt)) for prompt in prompts]
    assert columns["teacher_mask"].offsets.tolist() == of.offsets.tolist()
    return prompts


def shown(prompts: list[list[int]]) -> list[str]:
    """What each response's teacher reads between the question and the answer."""
    texts = [byte_tokenizer().decode(ids) for ids in prompts]
    assert all(text.startswith("<system>S<user>1+1?") and text.endswith("<assistant>~") for text in texts if text)
    return [text.removeprefix("<system>S<user>1+1?").removesuffix("<assistant>~") for text in texts]


def test_each_response_is_shown_the_next_success_and_never_itself() -> None:
    prompts = made(FOUR, [1.0, 0.5, 1.5, math.nan])
    assert shown(prompts) == ["/right: c.", "/right: c.", "/right: a.", "/right: a."]
    assert MESSAGES[1]["content"] == "1+1?", "the row stands as it is"
    one_of_four = ["/right: b.", "", "/right: b.", "/right: b."]
    for scores, threshold, expected in (
        ([0.0, 0.9, 0.0, 0.0], 1.0, [""] * 4),
        ([0.0, 1.0, 0.0, 0.0], 1.0, one_of_four),
        ([0.0, 0.9, 0.0, 0.0], 0.9, one_of_four),
        ([1.0, 1.0, 1.0, 1.0], None, [""] * 4),
    ):
        assert shown(made(FOUR, scores, success_threshold=threshold)) == expected


def test_what_was_said_of_a_response_stands_behind_a_success() -> None:
    said = ["no", " ", "", "yes"]
    both = ["/right: b./said: no.", "", "/right: b.", "/right: b./said: yes."]
    assert shown(made(FOUR, [0, 1, 0, 0], said, feedback_name="judge")) == both
    assert shown(made(FOUR, [0, 1, 0, 0], said)) == ["/right: b.", "", "/right: b.", "/right: b."], "it is not named"
    assert shown(made(["a"], [1], ["no {text}"], feedback_name="judge")) == ["/said: no {text}."]
    row = (MESSAGES, {"judge": "it is 2"})
    assert shown(made(["a", "b"], [0, 0], ["no", ""], row, feedback_name="judge")) == ["/said: no.", "/said: it is 2."]


def test_it_stands_behind_the_users_last_message_unless_it_is_too_long() -> None:
    begun = ([*MESSAGES, {"role": "assistant", "content": "It"}], {})
    prompts = made(["a", "b"], [0, 1], row=begun)
    assert byte_tokenizer().decode(prompts[0]).startswith("<system>S<user>1+1?/right: b.<assistant>It")
    (prompt, _) = made(["a", "b"], [0.0, 1.0], row=(*ROW, "plain"))
    assert byte_tokenizer().decode(prompt) == "S\n1+1?/right: b.", "a plain prompt's too"
    assert made(["a", "b"], [1, 1], row=(MESSAGES[:1], {})) == [[], []]
    longest = len(made(["a", "bb"], [0, 1])[0])
    for limit, expected in ((longest, "/right: bb."), (longest - 1, "")):
        assert shown(made(["a", "bb"], [0, 1], longest_prompt=limit)) == [expected, ""]
