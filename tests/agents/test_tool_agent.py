"""Episodes with tools: what stands in them, what of it trains, how they end, and what a run is refused for."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.agents import Episode, Row, ToolAgent, load_agent_loop
from grpo_dist.agents.episode import EpisodeEnded, behind_turn, opening_of_calls, tool_call
from grpo_dist.agents.tool_agent import Answer, load_tools
from grpo_dist.engines.base import ToolCall
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import ConfigError
from tests.agents.speaking import MESSAGES, PARSER, QWEN3, TOOLS, Speaker, call, parts, play, tokenizer_of
from tests.messages import refuses, says

ANSWERS = "\n<|im_start|>user{}<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "\n<tool_response>\n{}\n</tool_response>"
ENDS = {"<|im_end|>"}
SUM = call("add", '{"a": 2, "b": 3}')
QUOTIENT = call("divide", '{"a": 1, "b": 3}')


@pytest.fixture(scope="module")
def kwargs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "mine.py").write_text(TOOLS)
    (folder / "parser.py").write_text(PARSER)
    return {"tools": [f"{folder}/mine.py:add", f"{folder}/mine.py:divide"], "tool_parser": f"{folder}/parser.py:parse"}


def turns(kwargs: dict[str, Any], *said: str | Speaker, **limits: Any) -> Any:
    speaker = said[0] if isinstance(said[0], Speaker) else Speaker(tokenizer_of(), *said)
    return play(ToolAgent(**kwargs), speaker, dict(ToolAgent.template_kwargs(kwargs)), **limits)


def test_answers_stand_behind_the_turn_and_do_not_train(kwargs: dict[str, Any]) -> None:
    """The whole is the conversation as Qwen3's template renders it: engines/vllm/test_openai_app.py."""
    thoughts = "<think>\nI add.\n</think>\n\n"
    episode = turns(kwargs, f"{thoughts}{SUM}\n{QUOTIENT}", "It is 5.")
    assert parts(episode) == [
        (1, f"{thoughts}{SUM}\n{QUOTIENT}<|im_end|>"),
        (0, ANSWERS.format(ANSWER.format(5) + ANSWER.format(1 / 3))),
        (1, "It is 5.<|im_end|>"),
    ]
    assert episode.metrics == {"tool_calls": 2, "tool_errors": 0}
    assert (episode.num_turns, episode.truncated, episode.reward) == (2, False, None)
    assert "Add two numbers." in episode.tokenizer.decode(episode.prompt_ids)


def test_sampled_tokens_stay_as_they_were_sampled(kwargs: dict[str, Any]) -> None:
    """The tokenizer has a token for `: 2`, which the policy has not used; its JSON is its own."""
    tokenizer = tokenizer_of()
    odd = '<tool_call>{"arguments":{"b" : 3,"a": 2},"name":"add"}</tool_call>'
    ids = [*tokenizer.encode(odd, add_special_tokens=False), tokenizer.eos_token_id]
    tokenizer.add_tokens([": 2"])
    assert tokenizer.encode(odd, add_special_tokens=False) != ids[:-1]
    episode = turns(kwargs, Speaker(tokenizer, ids, "5"))
    assert episode.token_ids[: len(ids)] == ids
    assert episode.response().mask[: len(ids) + 1] == [1] * len(ids) + [0]


def test_mistakes_are_told_and_the_episode_goes_on(kwargs: dict[str, Any]) -> None:
    for said, told in (
        (call("sum", "{}"), ["'sum'", "add, divide"]),
        (call("add", '{"a": 2}'), ["add: b"]),
        ("<tool_call>\nadd(2, 3)\n</tool_call>", ["Error"]),
        ("I think that <tool_call> adds.", ["Error"]),
        (call("add", '{"a": "\\ud800", "b": 3}'), ["add: a"]),
        (call("\\ud800", "{}"), ["add, divide"]),
    ):
        episode = turns(kwargs, said, SUM, "5")
        written = parts(episode)
        assert [text for mask, text in written if mask] == [f"{text}<|im_end|>" for text in (said, SUM, "5")]
        says(written[1][1], *told)
        assert episode.metrics == {"tool_calls": 2, "tool_errors": 1}


def test_calls_answers_room_and_turns_have_limits(kwargs: dict[str, Any]) -> None:
    limits = {"max_parallel_calls": 1, "max_tool_response_length": 10}
    episode = turns(kwargs | limits, SUM + QUOTIENT * 2, QUOTIENT, "5")
    assert episode.metrics["tool_calls"] == 2
    text = parts(episode)[1][1]
    says(text, "5", "2", "1]")
    assert text.count("<tool_response>") == 1
    assert "0.333\n[8 characters are left out here]\n33333\n" in parts(episode)[3][1]
    for room in (len(SUM) + 1 + 10, len(SUM) + 1, 20):
        episode = turns(kwargs, SUM, "never", max_tokens=room)
        assert (episode.truncated, episode.num_turns, len(episode.token_ids)) == (True, 1, room)
        assert episode.response().mask == [1] * min(room, len(SUM) + 1) + [0] * max(0, room - len(SUM) - 1)
    with pytest.raises(EpisodeEnded):  # the runner makes it a truncated one
        turns(kwargs, SUM, SUM, SUM, max_turns=2)


def test_arguments_that_cannot_be(kwargs: dict[str, Any]) -> None:
    for change, told in (
        ({"tool_parser": "hermess"}, ["tool_parser=hermess", "hermes", "qwen3_xml"]),
        ({"tool_parser": None}, ["tool_parser=None"]),
        ({"tool_parser": "gone.py:parse"}, ["tool_parser=gone.py:parse"]),
        ({"tools": []}, ["tools=[]"]),
        ({"tools": "mine.py:say"}, ["agent_kwargs.tools"]),
        ({"tools": [3]}, ["agent_kwargs.tools"]),
        ({"tools": ["gone.py:add"]}, ["tools=gone.py:add"]),
        ({"max_parallel_calls": 0}, ["max_parallel_calls=0"]),
        ({"max_parallel_calls": 1.5}, ["max_parallel_calls=1.5"]),
        ({"tool_timeout_s": "1 s"}, ["tool_timeout_s='1 s'"]),
    ):
        with refuses(ConfigError, *told):
            ToolAgent.resolved(kwargs | change)
    with refuses(ConfigError, "agent_kwargs", "'tool_parser'"):
        load_agent_loop("tool_agent", {"tools": kwargs["tools"]})


NO_TOOLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
WITH_TOOLS = "{{ tools[0].function.name }}" + NO_TOOLS.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")
ONE_CALL = "{% if messages[1:] and messages[1].tool_calls | length > 1 %}{{ raise_exception('one only') }}{% endif %}"
NO_ANSWERS = WITH_TOOLS.replace("{{ m.content", "{{ '' if m.role == 'tool' else m.content")


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (None, ["chat_template.jinja"]),
        (NO_TOOLS, ["chat_template.jinja"]),
        (WITH_TOOLS.replace("<|im_end|>", "."), ["'<|im_end|>'", "1 calls"]),
        (ONE_CALL + WITH_TOOLS, ["2 calls", "one only", "max_parallel_calls=1"]),
        (NO_ANSWERS, ["answer"]),
    ],
)
def test_a_template_without_tools_is_refused(kwargs: dict[str, Any], template: str | None, told: list[str]) -> None:
    variables = ToolAgent.template_kwargs(kwargs)
    for named, key in ((kwargs, "tools"), ({"environment": "stock.py:Stock"}, "environment")):
        with refuses(ConfigError, f"agent_kwargs.{key}:", *told):
            ToolAgent.check_template(named, tokenizer_of(template), variables, ENDS)
    ToolAgent.check_template(kwargs, tokenizer_of(QWEN3), variables, ENDS)
    ToolAgent.check_template(kwargs | {"max_parallel_calls": 1}, tokenizer_of(ONE_CALL + WITH_TOOLS), variables, ENDS)


SOURCE = '''
from __future__ import annotations

import asyncio
import threading
from typing import Literal

all_there = threading.Barrier(40, timeout=20)  # more than any small pool has threads
second = asyncio.Event()

def area(sides: list[float], unit: Literal["m", "cm"] = "m", scale: int | None = None):
    """Compute the area of a rectangle.

    Args:
        sides: Their lengths.
        unit: What they are measured in.
        scale: What they are multiplied with.
    """
    return {"area": sides[0] * sides[1] * (scale or 1), "unit": unit}

async def first_waits(number: int) -> str:
    """Wait for a call with number 2.

    Args:
        number: The number.
    """
    second.set() if number == 2 else await second.wait()
    return f"done {number}"

def meet(name: str) -> str:
    """Wait for all others.

    Args:
        name: Of the caller.
    """
    all_there.wait()
    return name

def fail(how: str):
    """Fail.

    Args:
        how: In what way.
    """
    if how == "circle":
        circle = []
        circle.append(circle)
        return circle
    raise {"next": StopIteration, "exit": SystemExit(3), "own timeout": TimeoutError("the server")}[how]

def hang():
    """Wait for ever."""
    threading.Event().wait()

async def sleep():
    """Wait for ever, too."""
    await asyncio.Event().wait()

def say(text: str) -> str:
    """Say a text.

    Args:
        text: What to say.
    """
    return text

def nothing():
    """Answer with nothing."""
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tools") / "mine.py"
    path.write_text(SOURCE)
    return str(path)


def answers(file: str, *calls: tuple[str, Any], most: int = 500, timeout_s: float = 30.0) -> list[Answer]:
    tools = [f"{file}:{name}" for name in dict.fromkeys(name for name, _ in calls)]
    made = [ToolCall(name, given if isinstance(given, str) else json.dumps(given)) for name, given in calls]
    loop = ToolAgent(tools=tools, tool_parser="hermes", max_tool_response_length=most, tool_timeout_s=timeout_s)
    return asyncio.run(loop.answers(made))


def test_the_schema_is_that_of_the_signature_and_the_docstring(file: str) -> None:
    arguments = {
        "sides": {"type": "array", "items": {"type": "number"}, "description": "Their lengths."},
        "unit": {"type": "string", "enum": ["m", "cm"], "description": "What they are measured in."},
        "scale": {"type": "integer", "nullable": True, "description": "What they are multiplied with."},
    }
    assert load_tools([f"{file}:area"])["area"].schema["function"] == {
        "name": "area",
        "description": "Compute the area of a rectangle.",
        "parameters": {"type": "object", "properties": arguments, "required": ["sides"]},
    }


def test_calls_run_side_by_side_and_answer_in_their_order(file: str) -> None:
    """On an event loop, and on threads. What is no text is told as JSON."""
    given = {"sides": ["2", 3], "unit": "cm"}  # "2" is a number as well
    for calls, said in (
        ([("area", given), ("nothing", {}), ("nothing", "{}")], ['{"area": 6.0, "unit": "cm"}', "null", "null"]),
        ([("first_waits", {"number": 1}), ("first_waits", {"number": 2})], ["done 1", "done 2"]),
        ([("meet", {"name": str(i)}) for i in range(40)], [str(i) for i in range(40)]),
    ):
        assert answers(file, *calls) == [Answer(text, False) for text in said]


def test_a_call_that_fails_is_answered(file: str) -> None:
    for name, given, told in (
        ("area", '{"sides": [1', ["area", "JSON"]),
        ("area", "[" * 100_000, ["area", "JSON"]),
        ("area", [1, 2], ["area", "[1, 2]", "JSON object"]),
        ("area", {}, ["area: sides"]),
        ("area", {"sides": [1, "two"]}, ["area: sides.1"]),
        ("area", {"sides": [1, 2], "depth": 3}, ["area: depth"]),
        ("area", {"sides": [1, 2], "unit": "km"}, ["area: unit", "'cm'"]),
        ("area", {"sides": [1]}, ["IndexError:"]),
        ("fail", {"how": "next"}, ["StopIteration"]),
        ("fail", {"how": "exit"}, ["SystemExit: 3"]),
        ("fail", {"how": "circle"}, ["ValueError"]),
        ("fail", {"how": "own timeout"}, ["TimeoutError: the server"]),
        ("hang", {}, ["hang", "0.5 s"]),  # and is waited for no longer
        ("sleep", {}, ["sleep", "0.5 s"]),
    ):
        (found,) = answers(file, (name, given), timeout_s=0.5 if name in ("hang", "sleep") else 30.0)
        assert found.is_error
        assert found.text.startswith("Error: ")
        says(found.text, *told)


def test_a_long_answer_loses_its_middle(file: str) -> None:
    for said, most, told in (
        ("abcde", 5, "abcde"),
        ("abcdef" * 10, 5, "abc\n[55 characters are left out here]\nef"),
        ("abc", 1, "a\n[2 characters are left out here]\n"),
    ):
        assert answers(file, ("say", {"text": said}), most=most) == [Answer(told, False)]
    (error,) = answers(file, ("say", "x" * 100), most=20)
    says(error.text, "Error", "characters")


DOCUMENTED = '\n    """A.\n\n    Args:\n        a: A.\n    """\n'


def test_functions_that_cannot_be_tools(tmp_path: Path, file: str) -> None:
    for source, told in (
        ("def tool(a):" + DOCUMENTED, ["type hint"]),
        ("def tool(a: int): ...", ["docstring"]),
        ('def tool(a: int): "A."', ["'a'", "`Args:`"]),
        ("def tool(*a: int):" + DOCUMENTED, ["'a'", "variadic positional"]),
        ("def tool(a: int = 1, /):" + DOCUMENTED, ["'a'", "positional-only"]),
        ("def tool():\n    'A.'\n    yield 1", ["list"]),
        ("async def tool():\n    'A.'\n    yield 1", ["list"]),
        ("tool = 'a text'", ["'a text'"]),
        ("def toll(): 'A.'", ["'tool'", "toll"]),
    ):
        (tmp_path / "mine.py").write_text(source)
        with refuses(ConfigError, "agent_kwargs.tools", f"{tmp_path}/mine.py:tool", *told):
            load_tools([f"{tmp_path}/mine.py:tool"])
    with refuses(ConfigError, "agent_kwargs.tools", "'say'"):
        load_tools([f"{file}:say", f"{file}:say"])


# --- what a chat template writes behind a turn of the policy: Qwen3's own, and small ones with a whim each ---------
CALLS = [tool_call(0, "add"), tool_call(1, "add")]
FIVE = {"role": "tool", "content": "5"}
# A turn of the assistant, and one of a tool; calls stand in JSON.
JSON_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Refuses two turns of the same role.
ALTERNATING = (
    "{% for m in messages %}{% if not loop.first and loop.previtem.role == m.role %}"
    "{{ raise_exception('twice') }}{% endif %}{% endfor %}"
)


def behind(template: str = QWEN3, messages: Any = MESSAGES, ends: Any = ENDS, calls: Any = CALLS[:1]) -> str:
    options: dict[str, Any] = {"calls": calls, "ends": ends, "template_kwargs": {}, "is_ended": True}
    return behind_turn(tokenizer_of(template), messages, [FIVE], **options)


@pytest.mark.parametrize("calls", [(), CALLS[:1]])
def test_a_turn_that_goes_on_from_a_begun_one_is_one_turn(calls: Any) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Let me see:"}]
    assert behind(ALTERNATING + QWEN3, begun, calls=calls) == behind(calls=calls) == ANSWERS.format(ANSWER.format(5))


def test_a_template_may_end_turns_with_another_token_and_begin_calls_without_a_tag() -> None:
    assert behind(JSON_CALLS, ends={"<|eot|>", "<|im_end|>"}) == "<tool>5<|eot|><assistant>"
    with refuses(ValueError, "'<|im_end|>'"):
        behind(JSON_CALLS)
    assert opening_of_calls(tokenizer_of(JSON_CALLS), MESSAGES, {}) is None
    assert opening_of_calls(tokenizer_of(), MESSAGES, {}) == "<tool_call>"


async def test_any_loop_may_put_in_messages() -> None:
    tokenizer = tokenizer_of()
    speaker = Speaker(tokenizer, "5", tokenizer.encode("xy", add_special_tokens=False))
    sampling, limits = SamplingSettings(1, 1.0, 1.0, -1, 500, 5), {"tokenizer": tokenizer, "max_model_len": 600}
    episode = Episode(Row("p", [1], MESSAGES), sampling, template_kwargs={"enable_thinking": False}, **limits)
    episode.connect(speaker.sample)
    await episode.generate()
    episode.append_messages([{"role": "user", "content": "Sure?"}])
    await episode.generate(max_tokens=1)
    episode.append_messages([{"role": "user", "content": "Go on."}])
    asked = ANSWERS.replace("{}", "\n{}") + "<think>\n\n</think>\n\n"
    assert parts(episode) == [
        (1, "5<|im_end|>"),
        (0, asked.format("Sure?")),
        (1, "x"),
        (0, "<|im_end|>" + asked.format("Go on.")),
    ]
    alone = Episode(Row("p", [1]), sampling, **limits)
    with refuses(ValueError, "append_messages"):
        alone.append_messages([{"role": "user", "content": "Sure?"}])
