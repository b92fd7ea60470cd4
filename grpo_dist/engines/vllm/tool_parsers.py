"""vLLM's parsers of tool calls, each for the form in which some family of models writes them."""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_dist.engines.base import ParseCalls, ToolCall
from grpo_dist.errors import ConfigError

_TABLE = "_TOOL_PARSERS_TO_REGISTER"  # of vllm/tool_parsers/__init__.py


def parser_names() -> list[str]:
    """Their names, without importing vLLM, which takes seconds; empty where they cannot be read."""
    spec = find_spec("vllm")
    file = Path(*(spec.submodule_search_locations or ()) if spec else ()) / "tool_parsers" / "__init__.py"
    for node in ast.parse(file.read_text()).body if file.is_file() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _TABLE:
            return sorted(ast.literal_eval(node.value))
    return []


def vllm_parser(name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]], *, key: str) -> ParseCalls:
    """What vLLM's server does to find the calls in a text.

    Args:
        name: of the parser.
        tokenizer: of the model, by transformers.
        tools: their JSON schemas.
        key: the config key that names the parser, for messages.

    Raises:
        ConfigError: there is no such parser, or it is one for models with other tokens.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager
    from vllm.tokenizers.hf import get_cached_tokenizer

    for module in ("vllm.tool_parsers", "vllm.parser"):  # the policy is told of a call that they cannot read
        logging.getLogger(module).setLevel(logging.CRITICAL)
    cached: Any = get_cached_tokenizer(tokenizer)
    request: Any = ChatCompletionRequest.model_validate({"messages": [], "tools": list(tools)})
    try:
        parser = ParserManager.get_parser(name, enable_auto_tools=True, tokenizer=cached)
    except TypeError as error:
        raise ConfigError(f"{key}={name}: vLLM refuses it: {error}") from None
    assert parser is not None, "it is given a name"

    def parse(text: str) -> list[ToolCall]:
        made = parser(cached, request.tools)  # parsers remember what they have read
        _, _, calls = made.parse(text, request, enable_auto_tools=True)
        return [ToolCall(call.name, call.arguments) for call in calls or ()]

    return parse
