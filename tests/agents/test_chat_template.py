"""What a chat template writes behind a turn of the policy: Qwen3's own, and small ones with a whim each."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_dist.agents import Episode, Row
from grpo_dist.agents.episode import MARK, behind_turn, opening_of_calls, tool_call
from grpo_dist.engines.settings import SamplingSettings
from tests.agents.speaking import MESSAGES, QWEN3, Speaker, parts, tokenizer_of
from tests.messages import refuses

ANSWER = {"role": "tool", "content": "5"}
CALLS = [tool_call(0, "add"), tool_call(1, "add")]
# A turn of the assistant, and one of a tool; calls stand in JSON.
JSON_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one_call_only') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Refuses two turns of the same role.
ALTERNATING = (
    "{% for m in messages %}{% if not loop.first and loop.previtem.role == m.role %}"
    "{{ raise_exception('twice') }}{% endif %}{% endfor %}"
)


def behind(added: list[dict[str, Any]], template: str = QWEN3, is_ended: bool = True, **changes: Any) -> str:
    options: dict[str, Any] = {"calls": (), "ends": {"<|im_end|>"}, "template_kwargs": {}} | changes
    return behind_turn(tokenizer_of(template), MESSAGES, added, is_ended=is_ended, **options)


def test_the_answers_of_tools_stand_as_qwen3_has_them() -> None:
    one = behind([ANSWER], calls=CALLS[:1])
    assert one == "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    two = behind([ANSWER, ANSWER | {"content": "<|odd|>"}], calls=CALLS)
    assert two == one.replace("</tool_response>", "</tool_response>\n<tool_response>\n<|odd|>\n</tool_response>"), (
        "in one turn of the user"
    )


def test_a_turn_that_has_no_end_yet_gets_the_templates() -> None:
    assert behind([ANSWER], calls=CALLS[:1], is_ended=False) == "<|im_end|>" + behind([ANSWER], calls=CALLS[:1])


@pytest.mark.parametrize("calls", [(), CALLS[:1]])
def test_a_turn_that_goes_on_from_a_begun_one_is_one_turn(calls: Any) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Let me see:"}]
    options: dict[str, Any] = {"calls": calls, "ends": {"<|im_end|>"}, "template_kwargs": {}, "is_ended": True}
    alternating = ALTERNATING + QWEN3
    assert behind_turn(tokenizer_of(alternating), begun, [ANSWER], **options) == behind([ANSWER], calls=calls)


def test_the_template_has_the_variables_of_the_prompt() -> None:
    text = behind([{"role": "user", "content": "Sure?"}], template_kwargs={"enable_thinking": False})
    assert text == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_a_template_may_end_turns_with_another_token_and_some_refuse() -> None:
    other = JSON_CALLS.replace("<|im_end|>", "<|eot|>")
    assert behind([ANSWER], other, calls=CALLS[:1], ends={"<|eot|>", "<|im_end|>"}) == "<tool>5<|eot|><assistant>"
    with refuses(ValueError, "'<|im_end|>'"):
        behind([ANSWER], other, calls=CALLS[:1])
    with refuses(Exception, "one_call_only"):
        behind([ANSWER], JSON_CALLS, calls=CALLS)


@pytest.mark.parametrize(("template", "tag"), [(QWEN3, "<tool_call>"), (JSON_CALLS, None)])
def test_the_tag_that_opens_calls(template: str, tag: str | None) -> None:
    assert opening_of_calls(tokenizer_of(template), MESSAGES, {}) == tag


async def test_any_loop_may_put_in_messages() -> None:
    """A turn that a text has stopped gets its end; one that follows text that was put in, too."""
    tokenizer = tokenizer_of()
    speaker = Speaker(tokenizer, "5", tokenizer.encode("xy", add_special_tokens=False))
    sampling = SamplingSettings(1, 1.0, 1.0, -1, 500, 5)
    episode = Episode(Row("p", [1], MESSAGES), sampling, tokenizer=tokenizer, max_model_len=600)
    episode.connect(speaker.sample)
    await episode.generate()
    episode.append_messages([{"role": "user", "content": "Sure?"}])
    await episode.generate(max_tokens=1)
    episode.append_messages([{"role": "user", "content": "Go on."}])
    asked = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert parts(episode) == [
        (1, "5<|im_end|>"),
        (0, asked.format("Sure?")),
        (1, "x"),
        (0, "<|im_end|>" + asked.format("Go on.")),
    ]
    assert MARK not in episode.text
    alone = Episode(Row("p", [1]), sampling, tokenizer=tokenizer, max_model_len=600)
    with refuses(ValueError, "append_messages"):
        alone.append_messages([{"role": "user", "content": "Sure?"}])
