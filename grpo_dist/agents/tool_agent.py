"""The agent loop of tools: the policy calls Python functions, in the form that its model was trained for.

    actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent
    actor_rollout_ref.rollout.agent.agent_kwargs={tools: ["tools.py:add"], tool_parser: hermes}

Tools are told to the policy by their signatures and docstrings. The chat template renders them and their answers, and
the model's parser finds the calls. Whatever goes wrong in a call is an answer to the policy, never an exception here.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError, validate_call

from grpo_dist.agents.base import AGENT_LOOP, KWARGS_KEY, AgentLoop
from grpo_dist.agents.episode import MARK, Episode, Turn, behind_turn, opening_of_calls, rendered, tool_call
from grpo_dist.agents.runner import USER_ERRORS
from grpo_dist.engines.base import ParseCalls, ToolCall, builtin_backends
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.names import absolute
from grpo_dist.plugins.registry import described, load_attribute

TOOLS_KEY = f"{KWARGS_KEY}.tools"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)  # what a JSON object can give
_Outcome = tuple[Any, BaseException | None]  # what a function returns, and what it raises


class Answer(NamedTuple):
    """The answer to a call, as the policy reads it."""

    text: str
    is_error: bool


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call; `function` takes the arguments, checks their types and converts them."""

    name: str
    schema: Mapping[str, Any]
    function: Callable[..., Any]

    @classmethod
    def load(cls, named: Any) -> Tool:
        """The function that a name such as `path/to/file.py:function` stands for."""
        if not isinstance(named, str):
            raise ConfigError(f"{TOOLS_KEY}: name functions as path/to/file.py:NAME, not as {described(named)}")
        from transformers.utils import get_json_schema

        function = load_attribute(named, key=TOOLS_KEY)
        if not inspect.isfunction(function):
            raise ConfigError(f"{TOOLS_KEY}: {named} must be a function, is {described(function)}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(f"{TOOLS_KEY}: {named} yields values: a tool returns one; collect them in a list")
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind not in _NAMED:
                raise ConfigError(
                    f"{TOOLS_KEY}: {named}: calls name their arguments, and so cannot give {name!r}, which is "
                    f"{parameter.kind.description}; take an ordinary argument, a list or dict for several values"
                )
        try:
            return cls(function.__name__, get_json_schema(function), validate_call(function))
        except Exception as error:  # noqa: BLE001 - of either library, of many kinds
            raise ConfigError(
                f"{TOOLS_KEY}: {named}: {error}\nA tool has type hints, and a docstring that says what it does and, "
                "under `Args:`, what each argument is"
            ) from None


def load_tools(names: Any) -> dict[str, Tool]:
    """The tools by name."""
    if not isinstance(names, Sequence) or isinstance(names, str) or not names:
        raise ConfigError(f"{TOOLS_KEY}={names!r}: must be a list of functions, such as [path/to/file.py:NAME]")
    tools = [Tool.load(spec) for spec in names]
    for tool in tools:
        if [other.name for other in tools].count(tool.name) > 1:
            raise ConfigError(f"{TOOLS_KEY}: two functions are called {tool.name!r}; rename one")
    return {tool.name: tool for tool in tools}


class Toolbox:
    """Runs calls of tools; for many episodes at the same time."""

    def __init__(self, tools: Mapping[str, Tool], most_characters: int, timeout_s: float) -> None:
        self._tools, self._most, self._timeout_s = tools, most_characters, timeout_s

    async def answers(self, calls: Sequence[ToolCall]) -> list[Answer]:
        """Run calls side by side; their answers, in order."""
        return list(await asyncio.gather(*map(self._answer, calls)))

    async def _answer(self, call: ToolCall) -> Answer:
        if not call.name:
            return self._error("the call cannot be read; write it in the form that you were shown")
        if (tool := self._tools.get(call.name)) is None:
            return self._error(f"there is no tool {call.name!r}; there are {', '.join(self._tools)}")
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError) as error:
            return self._error(f"the arguments of {call.name} are not JSON: {error}")
        if not isinstance(arguments, dict):
            return self._error(f"the arguments of {call.name} are not a JSON object: {call.arguments}")
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                returned = await _returned(tool.function, arguments)
            text = returned if isinstance(returned, str) else json.dumps(returned, ensure_ascii=False, default=str)
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
            return self._error(f"{call.name}: {'; '.join(faults)}")
        except USER_ERRORS as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return self._error(f"{call.name} did not answer within {self._timeout_s:g} s")
            return self._error(f"{type(error).__name__}: {error}")
        return Answer(self._cut(text), False)

    def _error(self, problem: str) -> Answer:
        return Answer(self._cut(f"Error: {problem}"), True)

    def _cut(self, text: str) -> str:
        """The text without its middle, if it is too long."""
        if len(text) <= self._most:
            return text
        head = (self._most + 1) // 2
        left_out = len(text) - self._most
        return f"{text[:head]}\n[{left_out} characters are left out here]\n{text[head + left_out :]}"


async def _returned(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return or raise as a function does. One that may block has a thread of its own, which no pool waits for."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_Outcome] = loop.create_future()

    def tell(result: _Outcome) -> None:
        if not outcome.done():  # by the time limit
            outcome.set_result(result)

    def work() -> None:
        result: _Outcome
        try:
            result = function(**arguments), None
        except USER_ERRORS as error:  # not as the future's exception: that cannot be a StopIteration
            result = None, error
        with contextlib.suppress(RuntimeError):  # the run is over, and its event loop closed
            loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="tool", daemon=True).start()
    returned, error = await outcome
    if error is not None:
        raise error
    return returned


PARSER_KEY = f"{KWARGS_KEY}.tool_parser"
_LIMITS: Mapping[str, Any] = {"max_parallel_calls": int, "max_tool_response_length": int, "tool_timeout_s": float}
# A conversation that any template takes, to see what it makes of tools.
_PROBE = ({"role": "user", "content": "How much is it?"},)
_PROBE_ANSWER = "42 and 43"


@AGENT_LOOP.register("tool_agent")
class ToolAgent(AgentLoop):
    """Samples the policy, runs the tools that it calls, and goes on with their answers, until it calls none.

    What a tool raises, a call of no tool, and arguments that do not fit are answers too. Answers do not train.
    `tool_calls` and `tool_errors` are metrics of the episode.

    Args:
        tools: the functions, each as `path/to/file.py:NAME` or `pkg.module:NAME`; they have type hints and Google
            docstrings, may be async, and serve many episodes at the same time.
        tool_parser: what finds the calls in the policy's text: vLLM's parser of this name, such as hermes or qwen3_xml,
            or a function from that text to (name, arguments as JSON text) pairs, as `path/to/file.py:NAME`.
        max_parallel_calls: calls of a turn that are run, side by side; the policy is told that others are not.
        max_tool_response_length: characters of an answer; what is longer is cut in the middle, which the answer says.
        tool_timeout_s: seconds that a call may take.
    """

    def __init__(
        self,
        tools: Sequence[str],
        tool_parser: str,
        max_parallel_calls: int = 8,
        max_tool_response_length: int = 2048,
        tool_timeout_s: float = 60.0,
    ) -> None:
        by_name = load_tools(tools)
        self._schemas = [tool.schema for tool in by_name.values()]
        self._parser, self._most = tool_parser, max_parallel_calls
        self._toolbox = Toolbox(by_name, max_tool_response_length, tool_timeout_s)
        self._parse: ParseCalls | None = None
        self._opening: str | None = None

    @classmethod
    def resolved(cls, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """`agent_kwargs` with whole paths of files."""
        load_tools(kwargs["tools"])
        parser, known = kwargs["tool_parser"], [name for engine in builtin_backends() for name in engine.parser_names()]
        if not isinstance(parser, str) or (":" not in parser and known and parser not in known):
            raise ConfigError(f"{PARSER_KEY}={parser}: no engine has such a parser. Known: {', '.join(known)}")
        if ":" in parser:
            load_attribute(parser, key=PARSER_KEY)
        for name, kind in _LIMITS.items():
            value: Any = kwargs.get(name, 1)
            if type(value) not in (int, kind) or value <= 0:  # True is no number
                raise ConfigError(f"{KWARGS_KEY}.{name}={value!r}: must be above 0, of type {kind.__name__}")
        return {**kwargs, "tools": [absolute(tool) for tool in kwargs["tools"]], "tool_parser": absolute(parser)}

    @classmethod
    def template_kwargs(cls, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tools' schemas."""
        return {"tools": [dict(tool.schema) for tool in load_tools(kwargs["tools"]).values()]}

    @classmethod
    def check_template(
        cls, kwargs: Mapping[str, Any], tokenizer: Any, template_kwargs: Mapping[str, Any], ends: Collection[str]
    ) -> None:
        """Check that the template tells of tools, and renders as many answers as a turn may have."""
        problem = "is not there"
        if tokenizer.chat_template:
            problem = _fault(tokenizer, template_kwargs, kwargs.get("max_parallel_calls", 2), ends)
        if problem:
            raise ConfigError(
                f"{TOOLS_KEY}: the model's chat template {problem}; use a model whose template has tools, or add them "
                "to its chat_template.jinja"
            )

    async def run(self, episode: Episode) -> None:
        """Play the episode."""
        episode.metrics |= {"tool_calls": 0, "tool_errors": 0}
        while not (turn := await episode.generate()).truncated:
            calls = self._calls(episode, turn)
            if not calls:
                return
            made = calls[: self._most]
            answers = await self._toolbox.answers(made)
            episode.metrics["tool_calls"] += len(made)
            episode.metrics["tool_errors"] += sum(answer.is_error for answer in answers)
            texts = [answer.text for answer in answers]
            if len(calls) > len(made):
                texts[-1] += f"\n[{len(calls) - len(made)} more calls were not run: a turn may have {self._most}]"
            said_calls = [tool_call(i, call.name) for i, call in enumerate(made)]
            episode.append_messages(_messages(said_calls, texts), said_calls)

    def _calls(self, episode: Episode, turn: Turn) -> Sequence[ToolCall]:
        """The calls of a turn; one without a name stands for those that cannot be read."""
        if self._parse is None:
            self._parse = self._load_parser(episode.tokenizer)
            self._opening = opening_of_calls(episode.tokenizer, _PROBE, episode.template_kwargs)
        ids = turn.token_ids if turn.stop is not None else turn.token_ids[:-1]  # without the token that ended it
        text = episode.tokenizer.decode(ids, skip_special_tokens=False)
        calls = self._parse(text)
        if not calls and self._opening is not None and self._opening in text:
            return [ToolCall("", "")]
        return calls

    def _load_parser(self, tokenizer: Any) -> ParseCalls:
        if ":" not in self._parser:
            engines = builtin_backends()
            having = (engine for engine in engines if self._parser in engine.parser_names())
            return next(having, engines[0]).parser(self._parser, tokenizer, self._schemas, key=PARSER_KEY)
        function = load_attribute(self._parser, key=PARSER_KEY)
        return lambda text: [ToolCall(*call) for call in function(text)]


def _messages(calls: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> list[dict[str, Any]]:
    """The tools' answers to calls."""
    return [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": answer}
        for call, answer in zip(calls, answers, strict=True)
    ]


def _fault(tokenizer: Any, template_kwargs: Mapping[str, Any], most: int, ends: Collection[str]) -> str:
    """Say what is wrong with a chat template, in words; "": nothing."""
    first = template_kwargs["tools"][0]
    marked = {**first, "function": {**first["function"], "name": MARK}}
    doing = "tells nobody of tools"
    try:
        if MARK not in rendered(tokenizer, _PROBE, {**template_kwargs, "tools": [marked]}):
            return doing
        for count in (1, 2)[:most]:
            doing = f"cannot render {count} calls of a tool in a turn" + " (or set max_parallel_calls=1)" * (count - 1)
            calls = [tool_call(i, first["function"]["name"]) for i in range(count)]
            answers = _messages(calls, [_PROBE_ANSWER] * count)
            options: dict[str, Any] = {"calls": calls, "ends": ends, "template_kwargs": template_kwargs}
            text = behind_turn(tokenizer, _PROBE, answers, is_ended=True, **options)
            if text.count(_PROBE_ANSWER) != count:
                return "leaves out what tools answer"
    except Exception as error:  # noqa: BLE001 - whatever a template raises
        return f"{doing}: {type(error).__name__}: {error}"
    return ""
