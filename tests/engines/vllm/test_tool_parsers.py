"""vLLM's parsers of tool calls, and an episode with the one of Hermes under Qwen3's chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.agents import ToolAgent
from grpo_dist.engines.base import ToolCall
from grpo_dist.engines.vllm.tool_parsers import parser_names, vllm_parser
from grpo_dist.errors import ConfigError
from tests.agents.speaking import MESSAGES, TOOLS, Speaker, call, parts, play, tokenizer_of
from tests.messages import refuses

KEY = "tool_parser"
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
XML = """<tool_call>
<function=add>
<parameter=a>
2
</parameter>
<parameter=b>
3
</parameter>
</function>
</tool_call>"""


def parsed(name: str, text: str) -> list[tuple[str, Any]]:
    tokenizer = tokenizer_of()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])  # which Qwen's tokenizers have
    found = vllm_parser(name, tokenizer, SCHEMAS, key=KEY)(text)
    return [(each.name, json.loads(each.arguments)) for each in found]


def test_the_names_are_those_that_vllm_knows() -> None:
    from vllm.tool_parsers import ToolParserManager

    assert parser_names() == ToolParserManager.list_registered()


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("hermes", "It is 5.", []),
        ("hermes", "So:\n" + call("add", '{"a": 2, "b": 3}') * 2, [("add", {"a": 2, "b": 3})] * 2),
        ("hermes", "<tool_call>\nadd(2, 3)\n</tool_call>", []),
        ("qwen3_xml", f"<think>\nI add.\n</think>\n\n{XML}", [("add", {"a": 2, "b": 3})]),
        ("qwen3_xml", "It is 5.", []),
        ("pythonic", "[add(a=2, b=3), add(a=4, b=5)]", [("add", {"a": 2, "b": 3}), ("add", {"a": 4, "b": 5})]),
    ],
)
def test_calls_are_found(name: str, text: str, found: list[tuple[str, Any]]) -> None:
    assert parsed(name, text) == found


def test_a_parser_does_not_remember_the_turn_before() -> None:
    parse = vllm_parser("hermes", tokenizer_of(), SCHEMAS, key=KEY)
    for _ in range(2):
        assert parse(call("add", '{"a": 2}')) == [ToolCall("add", '{"a": 2}')]
        assert list(parse("5")) == []


@pytest.mark.parametrize("name", ["hermess", "llama3_json"])
def test_a_parser_that_is_not_there_or_needs_other_tokens(name: str) -> None:
    with refuses(ConfigError, f"{KEY}={name}"):
        vllm_parser(name, tokenizer_of(), SCHEMAS, key=KEY)


def test_an_episode_in_hermes_form_is_the_conversation_that_qwen3_renders(tmp_path: Path) -> None:
    """Two calls at once, a call that cannot be read, one of a tool that is not there, and the answer."""
    (tmp_path / "mine.py").write_text(TOOLS)
    kwargs = {"tools": [f"{tmp_path}/mine.py:add", f"{tmp_path}/mine.py:divide"], "tool_parser": "hermes"}
    two = [("add", {"a": 2, "b": 3}), ("divide", {"a": 1, "b": 0})]
    said = ["\n".join(call(name, json.dumps(given)) for name, given in two), "<tool_call>\nadd\n</tool_call>"]
    said += [call("sum", "{}"), "<think>\nSo it is.\n</think>\n\n5"]
    tokenizer, variables = tokenizer_of(), dict(ToolAgent.template_kwargs(kwargs))
    episode = play(ToolAgent(**kwargs), Speaker(tokenizer, *said), variables)
    assert [text for mask, text in parts(episode) if mask] == [f"{text}<|im_end|>" for text in said]
    told = [text for mask, text in parts(episode) if not mask]
    errors = [each.split("\n<tool_response>\n")[-1].partition("\n</tool_response>")[0] for each in told]
    assert [text.partition(":")[0] for text in errors] == ["Error"] * 3
    assert episode.metrics == {"tool_calls": 4, "tool_errors": 3}
    whole: list[dict[str, Any]] = [*MESSAGES]
    functions = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in two]
    whole += [{"role": "assistant", "content": "", "tool_calls": functions}]
    whole += [{"role": "tool", "content": "5"}, {"role": "tool", "content": errors[0]}]
    for text, error in zip(said[1:], [*errors[1:], None], strict=True):
        whole += [{"role": "assistant", "content": text}, *([{"role": "tool", "content": error}] if error else [])]
    rendered = tokenizer.apply_chat_template(whole, tokenize=False, **variables)
    assert tokenizer.decode(episode.prompt_ids + episode.token_ids) + "\n" == rendered
