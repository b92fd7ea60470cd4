"""The agent loop of tools (docs/environments.md#tools): the policy calls Python functions in its model's own form.

Signatures and docstrings tell the policy of tools; the chat template renders them and their answers, and the model's
parser finds the calls. Whatever goes wrong in a call is an answer to the policy, never an exception here. Tools may be
the public methods of a class, an environment, of which each episode has an object of its own (#a-class there).
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, NamedTuple, get_args, get_type_hints

from pydantic import ValidationError, validate_call

from grpo_dist.agents.base import AGENT_LOOP, KWARGS_KEY, AgentLoop
from grpo_dist.agents.episode import (
    MARK,
    Episode,
    EpisodeEnded,
    Turn,
    behind_turn,
    finite,
    opening_of_calls,
    rendered,
    tool_call,
)
from grpo_dist.agents.runner import USER_ERRORS
from grpo_dist.engines.base import ParseCalls, ToolCall, builtin_backends
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.names import absolute
from grpo_dist.plugins.registry import described, load_attribute, takes

TOOLS_KEY, ENVIRONMENT_KEY = f"{KWARGS_KEY}.tools", f"{KWARGS_KEY}.environment"
_OURS = ("reset", "get_reward", "close")  # methods of an environment that are no tools
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)  # what a JSON object can give
_ANYTIME = nullcontext()
_Outcome = tuple[Any, BaseException | None]  # what a function returns, and what it raises
PARSER_KEY = f"{KWARGS_KEY}.tool_parser"
_LIMITS: Mapping[str, Any] = {"max_parallel_calls": int, "max_tool_response_length": int, "tool_timeout_s": float}
# A conversation that any template takes, to see what it makes of tools.
_PROBE = ({"role": "user", "content": "How much is it?"},)
_PROBE_ANSWER = "42 and 43"


class Answer(NamedTuple):
    """The answer to a call, as the policy reads it, and the step reward that the call has earned."""

    text: str
    is_error: bool
    reward: float | None = None


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call; `function` takes the arguments, checks their types and converts them.

    Attributes:
        pays: whether it returns its answer and the turn's step reward, as its `-> tuple[str, float]` says.
        alone: held while it runs, if it is not async.
    """

    name: str
    schema: dict[str, Any]
    function: Callable[..., Any]
    pays: bool = False
    alone: AbstractContextManager[Any] = _ANYTIME

    @classmethod
    def of(cls, function: Callable[..., Any], named: str, key: str, owner: type | None = None) -> Tool:
        """The tool of a function, or of a method of the class `owner`, whose first argument the policy does not see."""
        from transformers.utils import get_json_schema

        if not inspect.isfunction(function):
            raise ConfigError(f"{key}: {named} must be a function, is {described(function)}")
        seen = function if owner is None else MethodType(function, owner)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(f"{key}: {named} yields values: a tool returns one; collect them in a list")
        for name, parameter in inspect.signature(seen).parameters.items():
            if parameter.kind not in _NAMED:
                raise ConfigError(
                    f"{key}: {named}: calls name their arguments, and so cannot give {name!r}, which is "
                    f"{parameter.kind.description}; take an ordinary argument, a list or dict for several values"
                )
        try:
            schema, pays = get_json_schema(seen), get_args(get_type_hints(function).get("return")) == (str, float)
            if pays:  # which is none of the policy's business
                del schema["function"]["return"]
            return cls(function.__name__, schema, validate_call(function), pays)
        except Exception as error:  # noqa: BLE001 - of either library, of many kinds
            raise ConfigError(
                f"{key}: {named}: {error}\nA tool has type hints, and a docstring that says what it does and, "
                "under `Args:`, what each argument is"
            ) from None


def load_tools(names: Any) -> dict[str, Tool]:
    """The tools by name."""
    if not isinstance(names, list | tuple) or {*map(type, names)} != {str}:
        raise ConfigError(
            f"{TOOLS_KEY}={names!r}: must be a list of functions, such as [path/to/file.py:NAME]; or name a class as "
            f"{KWARGS_KEY}.environment"
        )
    tools = dict[str, Tool]()
    for named in names:
        tool = Tool.of(load_attribute(named, key=TOOLS_KEY), named, TOOLS_KEY)
        if tools.setdefault(tool.name, tool) is not tool:
            raise ConfigError(f"{TOOLS_KEY}: two functions are called {tool.name!r}; rename one")
    return tools


class EnvironmentClass:
    """A class that environments are made of; `timeout_s` are the seconds that a method may take.

    Attributes:
        tools: its public methods by name; each takes the environment first.
        gives_reward: whether its environments say what an episode has earned.

    Raises:
        ConfigError: it is no class, cannot be made without arguments, lacks `reset`, or a method is no tool.
    """

    def __init__(self, named: str, timeout_s: float) -> None:
        self.made_of, self.timeout_s = load_attribute(str(named), key=ENVIRONMENT_KEY), timeout_s
        methods = dict(inspect.getmembers_static(self.made_of, inspect.isfunction))
        public = [name for name in methods if name not in _OURS and not name.startswith("_")]
        for fits, problem in (
            (isinstance(self.made_of, type), f"must be a class, is {described(self.made_of)}"),
            (takes(self.made_of), "must be made without arguments; reset() gets the row's columns"),
            ("reset" in methods, "needs a method reset(self, **columns)"),
            (public, "has no public method that the policy could call"),
        ):
            if not fits:
                raise ConfigError(f"{ENVIRONMENT_KEY}={named}: {problem}")
        of = functools.partial(Tool.of, key=ENVIRONMENT_KEY, owner=self.made_of)
        self.tools = {name: of(methods[name], f"{named}.{name}") for name in public}
        self.gives_reward = "get_reward" in methods or any(tool.pays for tool in self.tools.values())

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Environment]:
        """In the block, a new environment; it is closed however the block ends."""
        made = Environment(self, await _returned(self.made_of, self.timeout_s, self.made_of.__name__))
        try:
            yield made
        except BaseException:  # of which the cause is told, and not what close() makes of it
            with suppress(*USER_ERRORS):
                await made.call("close")
            raise
        await made.call("close")


class Environment:
    """The environment of one episode. Of its methods that are not async one runs at a time, in a thread."""

    def __init__(self, kind: EnvironmentClass, made: Any) -> None:
        self._kind, self.made, self._alone = kind, made, threading.Lock()  # one that was given up may still run
        own = {name: functools.partial(tool.function, made) for name, tool in kind.tools.items()}
        self.tools = {name: replace(kind.tools[name], function=own[name], alone=self._alone) for name in own}

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """Call a method that is no tool; None where the class has none of that name."""
        if (method := getattr(self.made, name, None)) is None:
            return None
        where = f"{type(self.made).__name__}.{name}()"
        return await _returned(functools.partial(method, **arguments), self._kind.timeout_s, where, self._alone)

    async def begin(self, episode: Episode) -> None:
        """Begin the episode of its row."""
        row, takes_all = episode.row, inspect.Parameter.VAR_KEYWORD
        columns = {**row.extra_info, "prompt": row.messages, "data_source": row.data_source}
        wanted = inspect.signature(self.made.reset).parameters
        if takes_all not in {parameter.kind for parameter in wanted.values()}:
            columns = {name: value for name, value in columns.items() if name in wanted}
        told, messages = await self.call("reset", **columns), [dict(message) for message in row.messages]
        if isinstance(told, str):
            messages[-1]["content"] += told
        elif isinstance(told, list) and all(isinstance(message, Mapping) and "role" in message for message in told):
            messages += told
        elif told is not None:
            raise TypeError(f"reset() returned {described(told)}: must be text, a list of messages, or None")
        if told:
            episode.begin(messages)

    async def end(self, episode: Episode) -> None:
        """Give the episode its reward, if the class has one: a number, or a dict of `score` and metrics."""
        earned = await self.call("get_reward")
        if isinstance(earned, Mapping):
            episode.metrics |= {name: value for name, value in earned.items() if name != "score"}
            earned = earned.get("score")
        if getattr(self.made, "get_reward", None) is not None:
            episode.reward = finite("what get_reward() returned", earned)
        elif self._kind.gives_reward and not episode.turns.rewards:  # no method that pays was called
            episode.reward = 0.0


async def _returned(function: Callable[[], Any], timeout_s: float, name: str, alone: Any = _ANYTIME) -> Any:
    """Return or raise as a function does, or raise TimeoutError. What may block has a thread that nobody waits for."""
    outcome = Future[_Outcome]()
    outcome.set_running_or_notify_cancel()  # who waits no longer does not cancel it

    def work() -> None:
        try:
            with alone:
                outcome.set_result((function(), None))
        except USER_ERRORS as error:  # not as the future's exception: that cannot be a StopIteration
            outcome.set_result((None, error))

    try:
        async with asyncio.timeout(timeout_s) as limit:
            if inspect.iscoroutinefunction(function):
                return await function()
            threading.Thread(target=contextvars.copy_context().run, args=(work,), name="tool", daemon=True).start()
            result, error = await asyncio.wrap_future(outcome)
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(f"{name} did not answer within {timeout_s:g} s") from None
    if error is not None:
        raise error
    return result


async def _answer(call: ToolCall, tools: Mapping[str, Tool], timeout_s: float) -> Answer:
    if not call.name:
        return Answer("Error: the call cannot be read; write it in the form that you were shown", True)
    if (tool := tools.get(call.name)) is None:
        return Answer(f"Error: there is no tool {call.name!r}; there are {', '.join(tools)}", True)
    try:
        if not isinstance(arguments := json.loads(call.arguments), dict):
            raise ValueError(call.arguments)
    except (ValueError, RecursionError) as error:
        return Answer(f"Error: the arguments of {call.name} are not a JSON object: {error}", True)
    try:
        result = await _returned(functools.partial(tool.function, **arguments), timeout_s, call.name, tool.alone)
        result, reward = result if tool.pays else (result, None)
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        return Answer(f"Error: {call.name}: {'; '.join(faults)}", True)
    except USER_ERRORS as error:
        return Answer(f"Error: {type(error).__name__}: {error}", True)
    return Answer(text, False, reward)


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
        kwargs = dict(tools=tools, environment=environment, tool_timeout_s=tool_timeout_s)
        self._tools, self._environment, self._schemas = _loaded(kwargs)
        self._parser, self._most, self._most_characters = tool_parser, max_parallel_calls, max_tool_response_length
        self._timeout_s = tool_timeout_s
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
        _, environment, _ = _loaded(kwargs)
        return environment is not None and environment.gives_reward

    @classmethod
    def template_kwargs(cls, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tools' schemas."""
        return {"tools": _loaded(kwargs)[2]}

    @classmethod
    def check_template(
        cls, kwargs: Mapping[str, Any], tokenizer: Any, template_kwargs: Mapping[str, Any], ends: Collection[str]
    ) -> None:
        """Check that the template tells of tools, and renders as many answers as a turn may have."""
        if problem := _fault(tokenizer, template_kwargs, kwargs.get("max_parallel_calls", 2), ends):
            key = TOOLS_KEY if kwargs.get("tools") else ENVIRONMENT_KEY
            raise ConfigError(
                f"{key}: the model's chat template {problem}; use a model whose template has tools, or add them "
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
        while not (turn := await episode.generate()).truncated:
            if not (calls := self._calls(episode, turn)):
                return
            made = calls[: self._most]
            answers = await self.answers(made, environment)
            episode.metrics["tool_calls"] += len(made)
            episode.metrics["tool_errors"] += sum(answer.is_error for answer in answers)
            if paid := [answer.reward for answer in answers if answer.reward is not None]:
                episode.add_step_reward(sum(paid))
            texts = [answer.text for answer in answers]
            if len(calls) > len(made):
                texts[-1] += f"\n[{len(calls) - len(made)} more calls were not run: a turn may have {self._most}]"
            said_calls = [tool_call(i, call.name) for i, call in enumerate(made)]
            episode.append_messages(_messages(said_calls, texts), said_calls)
            if environment is not None and getattr(environment.made, "done", False):
                return

    async def answers(self, calls: Sequence[ToolCall], environment: Environment | None = None) -> list[Answer]:
        """Run calls, side by side or, with an environment, one after the other; their answers, in order."""
        tools = {**self._tools, **(environment.tools if environment else {})}
        asked = (_answer(call, tools, self._timeout_s) for call in calls)
        found = [await answer for answer in asked] if environment else await asyncio.gather(*asked)
        return [answer._replace(text=self._cut(answer.text)) for answer in found]

    def _cut(self, text: str) -> str:
        """The text without its middle, if it is too long."""
        if (left_out := len(text) - self._most_characters) <= 0:
            return text
        head = (self._most_characters + 1) // 2
        return f"{text[:head]}\n[{left_out} characters are left out here]\n{text[head + left_out :]}"

    def _calls(self, episode: Episode, turn: Turn) -> Sequence[ToolCall]:
        """The calls of a turn; one without a name stands for those that cannot be read."""
        if self._parse is None:
            self._parse = self._load_parser(episode.tokenizer)
            self._opening = opening_of_calls(episode.tokenizer, _PROBE, episode.template_kwargs)
        ids = turn.token_ids if turn.stop is not None else turn.token_ids[:-1]  # without the token that ended it
        text = episode.tokenizer.decode(ids, skip_special_tokens=False)
        calls = self._parse(text)
        is_begun = self._opening is not None and self._opening in text
        return calls or [ToolCall("", "")] * is_begun

    def _load_parser(self, tokenizer: Any) -> ParseCalls:
        if ":" not in self._parser:
            engines = builtin_backends()
            having = (engine for engine in engines if self._parser in engine.parser_names())
            return next(having, engines[0]).parser(self._parser, tokenizer, self._schemas, key=PARSER_KEY)
        function = load_attribute(self._parser, key=PARSER_KEY)
        return lambda text: [ToolCall(*call) for call in function(text)]


def _loaded(kwargs: Mapping[str, Any]) -> tuple[dict[str, Tool], EnvironmentClass | None, list[dict[str, Any]]]:
    """The functions by name, and the class of environments, that `agent_kwargs` name; the schemas of all tools."""
    tools, environment = kwargs.get("tools", ()), kwargs.get("environment")
    kind = None if environment is None else EnvironmentClass(environment, kwargs.get("tool_timeout_s", 60.0))
    by_name = load_tools(tools) if tools or kind is None else {}
    if kind is not None and (both := sorted(by_name.keys() & kind.tools.keys())):
        raise ConfigError(f"{ENVIRONMENT_KEY}={environment}: {both[0]!r} is a name in {TOOLS_KEY} too; rename one")
    return by_name, kind, [tool.schema for tool in (*by_name.values(), *(kind.tools.values() if kind else ()))]


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
