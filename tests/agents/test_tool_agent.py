"""Episodes with tools: what stands in them, what of it trains, how they end, and what a run is refused for."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.agents import Episode, Row, ToolAgent, load_agent_loop
from grpo_dist.agents.episode import EpisodeEnded
from grpo_dist.agents.runner import EpisodeRunner
from grpo_dist.agents.tool_agent import Answer, Toolbox, load_tools
from grpo_dist.engines.base import Response, ToolCall
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import ConfigError
from tests.agents.speaking import MESSAGES, PARSER, QWEN3, TOOLS, Speaker, call, parts, play, tokenizer_of
from tests.messages import refuses, says
from tests.worker_settings import agent

ANSWERS = "\n<|im_start|>user{}<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "\n<tool_response>\n{}\n</tool_response>"
ENDS = {"<|im_end|>"}


@pytest.fixture(scope="module")
def kwargs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "mine.py").write_text(TOOLS)
    (folder / "parser.py").write_text(PARSER)
    return {"tools": [f"{folder}/mine.py:add", f"{folder}/mine.py:divide"], "tool_parser": f"{folder}/parser.py:parse"}


def turns(kwargs: dict[str, Any], *said: str | list[int], max_turns: int | None = None, max_tokens: int = 3000) -> Any:
    speaker = Speaker(tokenizer_of(), *said)
    variables = dict(ToolAgent.template_kwargs(kwargs))
    return play(ToolAgent(**kwargs), speaker, variables, max_turns=max_turns, max_tokens=max_tokens)


def test_answers_stand_behind_the_turn_and_do_not_train(kwargs: dict[str, Any]) -> None:
    calls = call("add", '{"a": 2, "b": 3}') + "\n" + call("divide", '{"a": 1, "b": 4}')
    episode = turns(kwargs, calls, "It is 5.")
    assert parts(episode) == [
        (1, calls + "<|im_end|>"),
        (0, ANSWERS.format(ANSWER.format(5) + ANSWER.format(0.25))),
        (1, "It is 5.<|im_end|>"),
    ]
    assert episode.metrics == {"tool_calls": 2, "tool_errors": 0}
    assert (episode.num_turns, episode.truncated, episode.reward) == (2, False, None)


def test_the_row_is_the_conversation_as_the_template_renders_it(kwargs: dict[str, Any]) -> None:
    """With the reasoning that Qwen3 writes, which its template keeps behind the last question."""
    thoughts = "<think>\nI add.\n</think>\n\n"
    made = call("add", '{"a": 2, "b": 3}')
    episode = turns(kwargs, thoughts + made, thoughts + "It is 5.")
    function = {"name": "add", "arguments": {"a": 2, "b": 3}}
    whole = [
        *MESSAGES,
        {"role": "assistant", "content": thoughts, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": thoughts + "It is 5."},
    ]
    tokenizer, variables = tokenizer_of(), ToolAgent.template_kwargs(kwargs)
    text = tokenizer.apply_chat_template(whole, tokenize=False, **variables)
    assert tokenizer.decode(episode.prompt_ids + episode.token_ids) + "\n" == text
    assert "Add two numbers." in text


def test_sampled_tokens_stay_as_they_were_sampled(kwargs: dict[str, Any]) -> None:
    """The tokenizer has a token for `: 2`, which the policy has not used; its JSON is its own."""
    tokenizer = tokenizer_of()
    odd = '<tool_call>{"arguments":{"b" : 3,"a": 2},"name":"add"}</tool_call>'
    ids = [*tokenizer.encode(odd, add_special_tokens=False), tokenizer.eos_token_id]
    tokenizer.add_tokens([": 2"])
    assert tokenizer.encode(odd, add_special_tokens=False) != ids[:-1]
    speaker = Speaker(tokenizer, ids, "5")
    episode = play(ToolAgent(**kwargs), speaker, dict(ToolAgent.template_kwargs(kwargs)))
    assert episode.token_ids[: len(ids)] == ids
    assert episode.response().mask[: len(ids) + 1] == [1] * len(ids) + [0]
    assert parts(episode)[1] == (0, ANSWERS.format(ANSWER.format(5)))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("sum", "{}"), ["'sum'", "add, divide"]),
        (call("add", '{"a": 2}'), ["add: b"]),
        (call("add", '"2"'), ["JSON object"]),
        (call("divide", '{"a": 1, "b": 0}'), ["ZeroDivisionError"]),
        ("<tool_call>\nadd(2, 3)\n</tool_call>", ["Error"]),
        ("I think that <tool_call> adds.", ["Error"]),
        (call("add", '{"a": "\\ud800", "b": 3}'), ["add: a"]),
        (call("\\ud800", "{}"), ["add, divide"]),
    ],
)
def test_mistakes_are_told_and_the_episode_goes_on(kwargs: dict[str, Any], said: str, told: list[str]) -> None:
    episode = turns(kwargs, said, call("add", '{"a": 2, "b": 3}'), "5")
    assert [text for mask, text in parts(episode) if mask] == [
        f"{said}<|im_end|>",
        call("add", '{"a": 2, "b": 3}') + "<|im_end|>",
        "5<|im_end|>",
    ]
    says(parts(episode)[1][1], *told)
    assert episode.metrics == {"tool_calls": 2, "tool_errors": 1}


def test_calls_beyond_the_limit_are_not_run_and_answers_are_cut(kwargs: dict[str, Any]) -> None:
    limits = {"max_parallel_calls": 1, "max_tool_response_length": 10}
    calls = call("add", '{"a": 2, "b": 3}') + call("divide", '{"a": 1, "b": 3}') * 2
    episode = turns(kwargs | limits, calls, call("divide", '{"a": 1, "b": 3}'), "5")
    assert episode.metrics["tool_calls"] == 2
    text = parts(episode)[1][1]
    says(text, "5", "2", "1]")
    assert text.count("<tool_response>") == 1
    assert "0.333\n[8 characters are left out here]\n33333\n" in parts(episode)[3][1]


def test_without_room_an_episode_is_truncated(kwargs: dict[str, Any]) -> None:
    made = call("add", '{"a": 2, "b": 3}')
    for room in (len(made) + 1 + 10, len(made) + 1, 20):
        episode = turns(kwargs, made, "never", max_tokens=room)
        assert (episode.truncated, episode.num_turns, len(episode.token_ids)) == (True, 1, room)
        assert episode.response().mask == [1] * min(room, len(made) + 1) + [0] * max(0, room - len(made) - 1)


def test_turns_have_a_limit(kwargs: dict[str, Any]) -> None:
    with pytest.raises(EpisodeEnded):  # the runner makes it a truncated one
        turns(kwargs, *[call("add", '{"a": 2, "b": 3}')] * 3, max_turns=2)


def test_a_text_that_stops_the_policy_may_hold_a_call(kwargs: dict[str, Any]) -> None:
    """What it wrote has no end token then, and gets the template's."""
    made = call("add", '{"a": 2, "b": 3}')

    class Stopped(Speaker):
        async def sample(self, prompt: list[int], sampling: SamplingSettings) -> Response:
            response = await super().sample(prompt, sampling)
            stopped = self.tokenizer.decode(response.token_ids).endswith("</tool_call>")
            return replace(response, stop="</tool_call>") if stopped else response

    tokenizer = tokenizer_of()
    speaker = Stopped(tokenizer, tokenizer.encode(made, add_special_tokens=False), "5")
    episode = play(ToolAgent(**kwargs), speaker, dict(ToolAgent.template_kwargs(kwargs)))
    assert parts(episode)[:2] == [(1, made), (0, "<|im_end|>" + ANSWERS.format(ANSWER.format(5)))]


def test_the_workers_get_whole_paths(kwargs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(TOOLS)
    monkeypatch.chdir(tmp_path)
    given = {"tools": ["mine.py:add"], "tool_parser": "hermes", "tool_timeout_s": 0.5}
    assert load_agent_loop("tool_agent", given) is ToolAgent
    assert ToolAgent.resolved(given) == given | {"tools": [f"{tmp_path}/mine.py:add"]}
    assert ToolAgent.resolved(kwargs) == kwargs


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tool_parser": "hermess"}, ["tool_parser=hermess", "hermes", "qwen3_xml"]),
        ({"tool_parser": None}, ["tool_parser=None"]),
        ({"tool_parser": "gone.py:parse"}, ["tool_parser=gone.py:parse"]),
        ({"tools": []}, ["tools=[]"]),
        ({"tools": ["gone.py:add"]}, ["tools=gone.py:add"]),
        ({"max_parallel_calls": 0}, ["max_parallel_calls=0"]),
        ({"max_parallel_calls": 1.5}, ["max_parallel_calls=1.5"]),
        ({"tool_timeout_s": "1 s"}, ["tool_timeout_s='1 s'"]),
    ],
)
def test_arguments_that_cannot_be(kwargs: dict[str, Any], change: dict[str, Any], told: list[str]) -> None:
    with refuses(ConfigError, *told):
        ToolAgent.resolved(kwargs | change)
    for name in ("tools", "tool_parser"):
        with refuses(ConfigError, "agent_kwargs", f"'{name}'"):
            load_agent_loop("tool_agent", {key: value for key, value in kwargs.items() if key != name})


NO_TOOLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
WITH_TOOLS = "{{ tools[0].function.name }}" + NO_TOOLS.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")
ONE_CALL = "{% if messages[1:] and messages[1].tool_calls | length > 1 %}{{ raise_exception('one only') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (None, ["chat_template.jinja"]),
        (NO_TOOLS, ["chat_template.jinja"]),
        (WITH_TOOLS.replace("<|im_end|>", "."), ["'<|im_end|>'", "1 calls"]),
        (ONE_CALL + WITH_TOOLS, ["2 calls", "one only", "max_parallel_calls=1"]),
        (
            WITH_TOOLS.replace("m.role }}>{{ m.content", "m.role }}>{{ '' if m.role == 'tool' else m.content"),
            ["answer"],
        ),
    ],
)
def test_a_template_without_tools_is_refused(kwargs: dict[str, Any], template: str | None, told: list[str]) -> None:
    variables = ToolAgent.template_kwargs(kwargs)
    with refuses(ConfigError, "agent_kwargs.tools", *told):
        ToolAgent.check_template(kwargs, tokenizer_of(template), variables, ENDS)


def test_templates_with_tools_pass(kwargs: dict[str, Any]) -> None:
    variables = ToolAgent.template_kwargs(kwargs)
    ToolAgent.check_template(kwargs, tokenizer_of(QWEN3), variables, ENDS)
    ToolAgent.check_template(kwargs | {"max_parallel_calls": 1}, tokenizer_of(ONE_CALL + WITH_TOOLS), variables, ENDS)


def test_the_runner_makes_the_loop_and_a_limit_of_turns_truncates(kwargs: dict[str, Any]) -> None:
    tokenizer = tokenizer_of()
    speaker = Speaker(tokenizer, *[call("add", '{"a": 2, "b": 3}')] * 3)
    variables = dict(ToolAgent.template_kwargs(kwargs))

    async def generate(prompt: list[int], sampling: SamplingSettings, request_id: str | None = None) -> Any:
        return [await speaker.sample(prompt, sampling)]

    async def run() -> Any:
        runner = EpisodeRunner(agent("tool_agent", kwargs, max_assistant_turns=2), generate)  # type: ignore[arg-type]
        await runner.start()
        sampling = SamplingSettings(1, 1.0, 1.0, -1, 3000, 5)
        limits: dict[str, Any] = {"max_model_len": 9000, "max_turns": 2, "template_kwargs": variables}
        try:
            return await runner.run([Episode(Row("p", [1], MESSAGES), sampling, tokenizer=tokenizer, **limits)])
        finally:
            await runner.stop()

    (episode,) = asyncio.run(run())
    assert (episode.truncated, episode.num_turns, episode.metrics["tool_calls"]) == (True, 2, 2)


SOURCE = '''
from __future__ import annotations

import asyncio
import threading
from typing import Literal

both = threading.Barrier(2, timeout=20)
second = asyncio.Event()
never = threading.Event()


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
    """Wait for another call.

    Args:
        name: Of the caller.
    """
    both.wait()
    return name


def fail(how: str):
    """Fail.

    Args:
        how: In what way.
    """
    if how == "next":
        next(iter([]))
    if how == "exit":
        raise SystemExit(3)
    if how == "circle":
        circle = []
        circle.append(circle)
        return circle
    if how == "own timeout":
        raise TimeoutError("the server")
    return 1 / 0


def hang():
    """Wait for ever."""
    never.wait()


async def sleep():
    """Wait for ever, too."""
    await asyncio.Event().wait()


def say(text: str, times: int = 1) -> str:
    """Say a text.

    Args:
        text: What to say.
        times: How often.
    """
    return text * times


def nothing():
    """Answer with nothing."""


def no_hints(a):
    """A.

    Args:
        a: A.
    """


def no_docstring(a: int): ...


def no_argument(a: int):
    """A."""


def several(*numbers: int):
    """A.

    Args:
        numbers: A.
    """


def by_place(number: int = 1, /, *, other: int = 2):
    """A.

    Args:
        number: A.
        other: A.
    """


def whatever(**values: int):
    """A.

    Args:
        values: A.
    """


def one_by_one():
    """A."""
    yield 1


async def one_by_one_later():
    """A."""
    yield 1


TEXT = "a text"
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tools") / "mine.py"
    path.write_text(SOURCE)
    return str(path)


def answers(file: str, *calls: tuple[str, Any], most: int = 500, timeout_s: float = 30.0) -> list[Answer]:
    tools = load_tools([f"{file}:{name}" for name in dict.fromkeys(name for name, _ in calls)])
    made = [ToolCall(name, given if isinstance(given, str) else json.dumps(given)) for name, given in calls]
    return asyncio.run(Toolbox(tools, most, timeout_s).answers(made))


def test_the_schema_is_that_of_the_signature_and_the_docstring(file: str) -> None:
    assert load_tools([f"{file}:area"])["area"].schema == {
        "type": "function",
        "function": {
            "name": "area",
            "description": "Compute the area of a rectangle.",
            "parameters": {
                "type": "object",
                "properties": {
                    "sides": {"type": "array", "items": {"type": "number"}, "description": "Their lengths."},
                    "unit": {"type": "string", "enum": ["m", "cm"], "description": "What they are measured in."},
                    "scale": {"type": "integer", "nullable": True, "description": "What they are multiplied with."},
                },
                "required": ["sides"],
            },
        },
    }


def test_calls_run_side_by_side_and_answer_in_their_order(file: str) -> None:
    found = answers(file, ("first_waits", {"number": 1}), ("first_waits", {"number": 2}))
    assert found == [Answer("done 1", False), Answer("done 2", False)]
    found = answers(file, ("meet", {"name": "a"}), ("meet", {"name": "b"}))
    assert [answer.text for answer in found] == ["a", "b"], "each blocks a thread until the other has come"


def test_what_is_no_text_is_told_as_json(file: str) -> None:
    given = {"sides": ["2", 3], "unit": "cm"}  # "2" is a number as well
    assert answers(file, ("area", given), ("nothing", {}), ("nothing", "{}")) == [
        Answer('{"area": 6.0, "unit": "cm"}', False),
        Answer("null", False),
        Answer("null", False),
    ]


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("area", '{"sides": [1', ["area", "JSON"]),
        ("area", "[" * 100_000, ["area", "JSON"]),
        ("area", [1, 2], ["area", "[1, 2]", "JSON object"]),
        ("area", {}, ["area: sides"]),
        ("area", {"sides": [1, "two"]}, ["area: sides.1"]),
        ("area", {"sides": [1, 2], "depth": 3}, ["area: depth"]),
        ("area", {"sides": [1, 2], "unit": "km"}, ["area: unit", "'cm'"]),
        ("area", {"sides": [1]}, ["IndexError:"]),
        ("fail", {"how": "zero"}, ["ZeroDivisionError: division"]),
        ("fail", {"how": "next"}, ["StopIteration"]),
        ("fail", {"how": "exit"}, ["SystemExit: 3"]),
        ("fail", {"how": "circle"}, ["ValueError"]),
        ("fail", {"how": "own timeout"}, ["TimeoutError: the server"]),
    ],
)
def test_a_call_that_fails_is_answered(file: str, name: str, given: Any, told: list[str]) -> None:
    (found,) = answers(file, (name, given))
    assert found.is_error
    assert found.text.startswith("Error: ")
    says(found.text, *told)


def test_there_is_no_such_tool(file: str) -> None:
    box = Toolbox(load_tools([f"{file}:say", f"{file}:area"]), 500, 30.0)
    unknown, unreadable = asyncio.run(box.answers([ToolCall("sey", "{}"), ToolCall("", "")]))
    says(unknown.text, "'sey'", "say, area")
    assert unreadable.is_error


@pytest.mark.parametrize("name", ["hang", "sleep"])
def test_a_call_that_takes_too_long_is_answered_and_waited_for_no_longer(file: str, name: str) -> None:
    begin = time.monotonic()
    (found,) = answers(file, (name, {}), timeout_s=0.1)
    assert found.is_error
    says(found.text, name, "0.1 s")
    assert time.monotonic() - begin < 20


def test_a_long_answer_loses_its_middle(file: str) -> None:
    whole, cut = answers(file, ("say", {"text": "abcde"}), ("say", {"text": "abcdef" * 10}), most=5)
    assert whole.text == "abcde"
    assert cut.text == "abc\n[55 characters are left out here]\nef"
    (one,) = answers(file, ("say", {"text": "abc"}), most=1)
    assert one.text == "a\n[2 characters are left out here]\n"
    (error,) = answers(file, ("say", "x" * 100), most=20)
    says(error.text, "Error", "characters")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["no_hints"], ["no_hints", "type hint"]),
        (["no_docstring"], ["no_docstring", "docstring"]),
        (["no_argument"], ["no_argument", "'a'", "`Args:`"]),
        (["several"], ["several", "'numbers'", "variadic positional"]),
        (["by_place"], ["by_place", "'number'", "positional-only"]),
        (["whatever"], ["whatever", "'values'", "variadic keyword"]),
        (["one_by_one"], ["one_by_one", "list"]),
        (["one_by_one_later"], ["one_by_one_later", "list"]),
        (["TEXT"], ["TEXT", "'a text'"]),
        (["tell"], ["'tell'", "say"]),
        (["say", "say"], ["'say'"]),
    ],
)
def test_functions_that_cannot_be_tools(file: str, names: list[str], told: list[str]) -> None:
    with refuses(ConfigError, "agent_kwargs.tools", *told):
        load_tools([f"{file}:{name}" for name in names])


@pytest.mark.parametrize("names", [[], "mine.py:say", None, [3], ["no/such/file.py:say"]])
def test_names_that_are_none(names: object) -> None:
    with refuses(ConfigError, "agent_kwargs.tools"):
        load_tools(names)


def test_threads_do_not_run_out(tmp_path: Path) -> None:
    """More calls than any small pool has threads, each of which waits for all."""
    path = tmp_path / "many.py"
    path.write_text(SOURCE.replace("Barrier(2,", "Barrier(40,"))
    found = answers(str(path), *[("meet", {"name": str(i)}) for i in range(40)])
    assert [answer.text for answer in found] == [str(i) for i in range(40)]
