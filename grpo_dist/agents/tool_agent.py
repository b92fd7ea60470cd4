"""The agent loop of tools (docs/environments.md#tools): the policy calls Python functions in its model's own form.

The chat template renders tools and their answers, and the model's parser finds the calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from grpo_dist.agents.base import AGENT_LOOP, KWARGS_KEY, AgentLoop
from grpo_dist.agents.episode import (
    MARK,
    Episode,
    EpisodeEnded,
    Turn,
    behind_turn,
    opening_of_calls,
    rendered,
    tool_call,
)
from grpo_dist.agents.tools import ENVIRONMENT_KEY, TOOLS_KEY, Environment, EnvironmentClass, Tool, Toolbox, load_tools
from grpo_dist.engines.base import ParseCalls, ToolCall, builtin_backends
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.names import absolute
from grpo_dist.plugins.registry import load_attribute

PARSER_KEY = f"{KWARGS_KEY}.tool_parser"
_LIMITS: Mapping[str, Any] = {"max_parallel_calls": int, "max_tool_response_length": int, "tool_timeout_s": float}
# A conversation that any template takes, to see what it makes of tools.
_PROBE = ({"role": "user", "content": "How much is it?"},)
_PROBE_ANSWER = "42 and 43"


@AGENT_LOOP.register("tool_agent")
class ToolAgent(AgentLoop):
    """Samples the policy, runs the tools that it calls, and goes on with their answers, until it calls none.

    What a tool raises, a call of no tool, and arguments that do not fit are answers too. Answers do not train.
    `tool_calls` and `tool_errors` are metrics of the episode. A tool that returns `tuple[str, float]` pays its turn.

    Args:
        tools: the functions, each as `path/to/file.py:NAME` or `pkg.module:NAME`; they have type hints and Google
            docstrings, may be async, and serve many episodes at the same time.
        environment: a class in the same form; each episode has an object of it, whose public methods are tools too.
        tool_parser: what finds the calls in the policy's text: vLLM's parser of this name, such as hermes or qwen3_xml,
            or a function from that text to (name, arguments as JSON text) pairs, as `path/to/file.py:NAME`.
        max_parallel_calls: calls of a turn that are run, side by side; the policy is told that others are not.
        max_tool_response_length: characters of an answer; what is longer is cut in the middle, which the answer says.
        tool_timeout_s: seconds that a call may take, and each other method of an environment.
    """

    def __init__(
        self,
        *,
        tools: Sequence[str] = (),
        environment: str | None = None,
        tool_parser: str,
        max_parallel_calls: int = 8,
        max_tool_response_length: int = 2048,
        tool_timeout_s: float = 60.0,
    ) -> None:
        by_name, self._environment = _loaded(dict(tools=tools, environment=environment, tool_timeout_s=tool_timeout_s))
        self._schemas = _schemas(by_name, self._environment)
        self._parser, self._most = tool_parser, max_parallel_calls
        self._toolbox = Toolbox(by_name, max_tool_response_length, tool_timeout_s)
        self._parse: ParseCalls | None = None
        self._opening: str | None = None

    @classmethod
    def resolved(cls, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """`agent_kwargs` with whole paths of files."""
        _loaded(kwargs)
        parser, known = kwargs["tool_parser"], [name for engine in builtin_backends() for name in engine.parser_names()]
        if not isinstance(parser, str) or (":" not in parser and known and parser not in known):
            raise ConfigError(f"{PARSER_KEY}={parser}: no engine has such a parser. Known: {', '.join(known)}")
        if ":" in parser:
            load_attribute(parser, key=PARSER_KEY)
        for name, kind in _LIMITS.items():
            value: Any = kwargs.get(name, 1)
            if type(value) not in (int, kind) or value <= 0:  # True is no number
                raise ConfigError(f"{KWARGS_KEY}.{name}={value!r}: must be above 0, of type {kind.__name__}")
        named = {"environment": absolute(kwargs["environment"])} if kwargs.get("environment") else {}
        tools = [absolute(tool) for tool in kwargs.get("tools", ())]
        return {**kwargs, "tools": tools, **named, "tool_parser": absolute(parser)}

    @classmethod
    def rewards(cls, kwargs: Mapping[str, Any]) -> bool:
        """Whether its environments do."""
        environment = _loaded(kwargs)[1]
        return environment is not None and environment.gives_reward

    @classmethod
    def template_kwargs(cls, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tools' schemas."""
        return {"tools": [dict(schema) for schema in _schemas(*_loaded(kwargs))]}

    @classmethod
    def check_template(
        cls, kwargs: Mapping[str, Any], tokenizer: Any, template_kwargs: Mapping[str, Any], ends: Collection[str]
    ) -> None:
        """Check that the template tells of tools, and renders as many answers as a turn may have."""
        if problem := _fault(tokenizer, template_kwargs, kwargs.get("max_parallel_calls", 2), ends):
            raise ConfigError(
                f"{TOOLS_KEY}: the model's chat template {problem}; use a model whose template has tools, or add them "
                "to its chat_template.jinja"
            )

    async def run(self, episode: Episode) -> None:
        """Play the episode."""
        episode.metrics |= {"tool_calls": 0, "tool_errors": 0}
        if self._environment is None:
            return await self._play(episode)
        async with self._environment.opened() as environment:
            await environment.begin(episode)
            try:
                await self._play(episode, environment)
            except (EpisodeEnded, asyncio.CancelledError):  # by a limit: what it has earned until then counts
                await environment.end(episode)
                raise
            await environment.end(episode)

    async def _play(self, episode: Episode, environment: Environment | None = None) -> None:
        methods = None if environment is None else environment.tools
        while not (turn := await episode.generate()).truncated:
            calls = self._calls(episode, turn)
            if not calls:
                return
            made = calls[: self._most]
            answers = await self._toolbox.answers(made, methods)
            episode.metrics["tool_calls"] += len(made)
            episode.metrics["tool_errors"] += sum(answer.is_error for answer in answers)
            if paid := [answer.reward for answer in answers if answer.reward is not None]:
                episode.add_step_reward(sum(paid))
            texts = [answer.text for answer in answers]
            if len(calls) > len(made):
                texts[-1] += f"\n[{len(calls) - len(made)} more calls were not run: a turn may have {self._most}]"
            said_calls = [tool_call(i, call.name) for i, call in enumerate(made)]
            episode.append_messages(_messages(said_calls, texts), said_calls)
            if environment is not None and environment.done:
                return

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


def _loaded(kwargs: Mapping[str, Any]) -> tuple[dict[str, Tool], EnvironmentClass | None]:
    """The functions by name, and the class of environments, that `agent_kwargs` name."""
    tools, environment = kwargs.get("tools", ()), kwargs.get("environment")
    kind = None if environment is None else EnvironmentClass(environment, kwargs.get("tool_timeout_s", 60.0))
    by_name = load_tools(tools) if tools or kind is None else {}
    if kind is not None and (both := sorted(by_name.keys() & kind.tools.keys())):
        raise ConfigError(f"{ENVIRONMENT_KEY}={environment}: {both[0]!r} is a name in {TOOLS_KEY} too; rename one")
    return by_name, kind


def _schemas(tools: Mapping[str, Tool], kind: EnvironmentClass | None) -> list[Mapping[str, Any]]:
    return [tool.schema for tool in (*tools.values(), *(kind.tools.values() if kind else ()))]


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
