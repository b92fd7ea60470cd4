"""The tasks of examples/tools, and what their scorers count."""

from __future__ import annotations

import json
import re
from types import ModuleType

import pytest

from tests.examples.test_examples import EXAMPLES, load_module


@pytest.fixture(scope="module")
def tools() -> ModuleType:
    return load_module(EXAMPLES / "tools" / "tools.py")


def test_every_question_is_answered_by_searches_one_after_the_other(tools: ModuleType) -> None:
    for question, answer in tools.QUESTIONS:
        found = re.search(r"firm (\w+)", question)
        assert found is not None
        (person,) = re.findall(rf"{found[1]} was founded by (\w+)", " ".join(tools.search(f"founder of {found[1]}")))
        (town,) = re.findall(rf"{person} was born in the town of (\w+)", " ".join(tools.search(f"{person} born")))
        if question.startswith("On which river"):
            (town,) = re.findall(rf"{town} lies on the river (\w+)", " ".join(tools.search(f"river of {town}")))
        assert town == answer
    assert len({question for question, _ in tools.QUESTIONS}) == 240


def test_the_answer_counts_that_stands_last_in_its_tags(tools: ModuleType) -> None:
    score = lambda text: tools.compute_score("search", text, "Sokame", {})  # noqa: E731
    assert score("It is <answer>Ba</answer>, no: <answer> sokame.</answer>") == {"score": 1.0, "acc": 1.0}
    assert score("<answer>Sokame</answer><answer>Ba</answer>") == {"score": 0.1, "acc": 0.0}
    assert score("tool\nSokame") == {"score": 0.0, "acc": 0.0}
    assert [tools.calculator(7, operation, 3) for operation in "+-*"] == [10, 4, 21]


def test_calls_of_agents_are_scored_as_a_plan() -> None:
    agents = load_module(EXAMPLES / "tools" / "agents.py")
    steps = [{"agent": "search", "task": "find the menu"}, {"agent": "writer", "task": "write a poem"}]
    calls = [
        f'<tool_call>{{"name": "ask", "arguments": {json.dumps(step)}}}</tool_call>\ntool\ndone\n' for step in steps
    ]
    score = lambda text: agents.compute_score("agents", text, steps, {})  # noqa: E731
    assert score("".join(calls))["acc"] == 1.0
    assert score("".join(calls))["score"] == pytest.approx(1.0)
    assert score("".join(reversed(calls)))["order"] == 0.5
    assert score(calls[0])["steps"] == 0.5
    assert score("<tool_call>{not JSON}</tool_call>")["schema"] == score("")["order"] == 0.0
