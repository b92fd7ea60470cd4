"""Where a process reward model judges the steps of an answer, in the conventions of three kinds of models."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_dist.data.step_tokens import (
    StepForm,
    StepRenderer,
    StepTokens,
    judging_token,
    split_steps,
    step_ends,
    step_form,
    step_tokens,
)
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plan.commands import load_config
from tests.data.test_tokenize import byte_tokenizer
from tests.messages import refuses

PROMPT = [{"role": "user", "content": "1+1=?"}]
START = "<user>1+1=?<assistant>"


def judged(found: StepTokens, tokenizer: object) -> list[str]:
    """The text of the conversation up to each place."""
    return [tokenizer.decode(found.token_ids[: end + 1]) for end in found.ends]  # type: ignore[attr-defined]


def test_behind_the_separator_and_at_the_end_of_the_conversation() -> None:
    """TRL's PRMTrainer; the template closes the answer, and the last step is judged there."""
    tokenizer = byte_tokenizer("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}!")
    found = step_tokens(tokenizer, PROMPT, ["1+1", "=2"], StepForm(), None)
    assert tokenizer.decode(found.token_ids) == f"{START}1+1\n=2!"
    assert tokenizer.decode(found.token_ids[: found.first]) == START
    assert judged(found, tokenizer) == [f"{START}1+1\n", f"{START}1+1\n=2!"]
    other = step_tokens(tokenizer, PROMPT, ["1+1;", "=2"], StepForm(separator=";"), None)
    assert judged(other, tokenizer) == [f"{START}1+1;", f"{START}1+1;=2!"]


def test_at_a_text_behind_every_step() -> None:
    """Math-Shepherd's: white space behind the tag is not where the model judges."""
    tokenizer = byte_tokenizer("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}!")
    found = step_tokens(tokenizer, PROMPT, ["a\n", "b"], StepForm(token=" *\n"), None)
    assert tokenizer.decode(found.token_ids) == f"{START}a *\nb *\n!"
    assert judged(found, tokenizer) == [f"{START}a *", f"{START}a *\nb *"]


@pytest.mark.parametrize(
    ("tokens", "separator", "steps", "ends"),
    [
        (["a", "b", "\n", "c", ""], "\n", ["ab", "c"], [2, 4]),  # the last step ends with the end-of-sequence token
        (["a\n", "b\n", ""], "\n", ["a", "b"], [0, 1]),  # nothing follows the last separator
        (["a\nb\nc"], "\n", ["a", "b", "c"], [0, 0, 0]),  # steps that share a token
        (["a", "\n\n", "b"], "\n", ["a", "b"], [1, 2]),  # an empty line is no step
        (["x", "-", ">", "y"], "->", ["x", "y"], [2, 3]),  # a separator of two tokens
        (["abc", ""], "\n", ["abc"], [1]),
        (["", "\n", " "], "\n", [], []),
        (list("\n\na\n \n"), "\n", ["a"], [3]),
        ([], "\n", [], []),
    ],
)
def test_steps_and_their_last_tokens(tokens: list[str], separator: str, steps: list[str], ends: list[int]) -> None:
    assert [step.strip() for step in split_steps("".join(tokens), separator)] == steps
    assert step_ends(tokens, separator) == ends


def test_a_response_becomes_the_conversation() -> None:
    policy = byte_tokenizer()
    own = byte_tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    judge = StepRenderer(own, "key=path", StepForm(), None, policy)
    found, count = judge(PROMPT, policy("a\n\nb\n")["input_ids"])
    assert own.decode(found.token_ids) == "[user]1+1=?[assistant]a\nb"
    assert count == len(found.ends) == 2
    nothing, count = judge(PROMPT, [])
    assert (own.decode(nothing.token_ids), count, len(nothing.ends)) == ("[user]1+1=?[assistant]", 0, 1)
    refusing = byte_tokenizer("{{ raise_exception('no') }}")
    with refuses(DataError, "key=path", "user, assistant", "data.system_prompt"):
        StepRenderer(refusing, "key=path", StepForm(), None)(PROMPT, [])


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(ValueError, match="answer"):
        step_tokens(byte_tokenizer("{{ messages[0].content }}"), PROMPT, ["a"], StepForm(), None)
    tokenizer = byte_tokenizer()
    assert judging_token(tokenizer, "+", "reward_model.process.good") == tokenizer.convert_tokens_to_ids("+")
    with refuses(ConfigError, "reward_model.process.good='good'", "4 tokens", "one"):
        judging_token(tokenizer, "good", "reward_model.process.good")


def test_the_form_of_a_run() -> None:
    model = ("reward_model.enable=true", "reward_model.model.path=models/judge")
    assert step_form(load_config(model)[0].reward_model.process, "|") is None
    process = ("reward_model.process.enable=true", "reward_model.process.step_tag=' *'")
    assert step_form(load_config([*model, *process])[0].reward_model.process, "|") == StepForm("|", " *")
    assert StepForm().parts(["a\n", "b", "c"]) == ["a\n", "b\n", "c"]
    assert np.array_equal(StepForm(token="*").parts(["a\n", "b"]), ["a*", "b*"])
