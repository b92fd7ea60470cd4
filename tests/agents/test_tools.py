"""Functions as tools: what the policy is told of them, and what it is told of its calls."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.agents.tools import Answer, Toolbox, load_tools
from grpo_dist.engines.base import ToolCall
from grpo_dist.errors import ConfigError
from tests.messages import refuses, says

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
