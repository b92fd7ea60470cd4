"""Tools: Python functions that the policy calls, their schemas, and what it reads of a call.

Tools are told to the policy by their signatures and docstrings. Whatever goes wrong in a call is an answer to the
policy, never an exception here. They may be the public methods of a class, an environment, of which each episode has an
object of its own; the form is that of TRL's `environment_factory` (docs/environments.md#a-class).
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from numbers import Real
from types import MethodType
from typing import Any, NamedTuple, get_args, get_type_hints

from pydantic import ValidationError, validate_call

from grpo_dist.agents.base import KWARGS_KEY
from grpo_dist.agents.episode import Episode, finite
from grpo_dist.agents.runner import USER_ERRORS
from grpo_dist.engines.base import ToolCall
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.registry import described, load_attribute, takes

TOOLS_KEY, ENVIRONMENT_KEY = f"{KWARGS_KEY}.tools", f"{KWARGS_KEY}.environment"
_OURS = ("reset", "get_reward", "close")  # methods of an environment that are no tools
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)  # what a JSON object can give
_ANYTIME = nullcontext()
_Outcome = tuple[Any, BaseException | None]  # what a function returns, and what it raises


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
    schema: Mapping[str, Any]
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


class Toolbox:
    """Runs calls of tools; for many episodes at the same time."""

    def __init__(self, tools: Mapping[str, Tool], most_characters: int, timeout_s: float) -> None:
        self._tools, self._most, self._timeout_s = tools, most_characters, timeout_s

    async def answers(self, calls: Sequence[ToolCall], methods: Mapping[str, Tool] | None = None) -> list[Answer]:
        """Run calls side by side; their answers, in order.

        Args:
            methods: further tools, of an episode's environment: each call begins when the one before it has ended.
        """
        tools = {**self._tools, **(methods or {})}
        if methods is None:
            return list(await asyncio.gather(*(self._answer(call, tools) for call in calls)))
        return [await self._answer(call, tools) for call in calls]

    async def _answer(self, call: ToolCall, tools: Mapping[str, Tool]) -> Answer:
        if not call.name:
            return self._error("the call cannot be read; write it in the form that you were shown")
        if (tool := tools.get(call.name)) is None:
            return self._error(f"there is no tool {call.name!r}; there are {', '.join(tools)}")
        try:
            if not isinstance(arguments := json.loads(call.arguments), dict):
                raise ValueError(call.arguments)
        except (ValueError, RecursionError) as error:
            return self._error(f"the arguments of {call.name} are not a JSON object: {error}")
        try:
            result = await returned(tool.function, arguments, self._timeout_s, call.name, tool.alone)
            result, reward = result if tool.pays else (result, None)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
            return self._error(f"{call.name}: {'; '.join(faults)}")
        except USER_ERRORS as error:
            return self._error(f"{type(error).__name__}: {error}")
        return Answer(self._cut(text), False, reward)

    def _error(self, problem: str) -> Answer:
        return Answer(self._cut(f"Error: {problem}"), True)

    def _cut(self, text: str) -> str:
        """The text without its middle, if it is too long."""
        if len(text) <= self._most:
            return text
        head = (self._most + 1) // 2
        left_out = len(text) - self._most
        return f"{text[:head]}\n[{left_out} characters are left out here]\n{text[head + left_out :]}"


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
        made = Environment(self, await returned(self.made_of, {}, self.timeout_s, self.made_of.__name__))
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
        self._kind, self._made, self._alone = kind, made, threading.Lock()  # one that was given up may still run

    @property
    def tools(self) -> Mapping[str, Tool]:
        """Its tools by name."""
        tools = self._kind.tools.items()
        bound = functools.partial
        return {
            name: replace(tool, function=bound(tool.function, self._made), alone=self._alone) for name, tool in tools
        }

    @property
    def done(self) -> bool:
        """Whether it has ended the episode."""
        return bool(getattr(self._made, "done", False))

    async def call(self, name: str, **arguments: Any) -> Any:
        """Call a method that is no tool; None where the class has none of that name."""
        if (method := getattr(self._made, name, None)) is None:
            return None
        where = f"{type(self._made).__name__}.{name}()"
        return await returned(method, arguments, self._kind.timeout_s, where, self._alone)

    async def begin(self, episode: Episode) -> None:
        """Begin the episode of its row."""
        row, takes_all = episode.row, inspect.Parameter.VAR_KEYWORD
        columns = {**row.extra_info, "prompt": row.messages, "data_source": row.data_source}
        wanted = inspect.signature(self._made.reset).parameters
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
        if isinstance(earned, Real) or getattr(self._made, "get_reward", None) is not None:
            episode.reward = finite("what get_reward() returned", earned)
        elif self._kind.gives_reward and not episode.turns.rewards:  # no method that pays was called
            episode.reward = 0.0


async def returned(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    timeout_s: float,
    name: str,
    alone: AbstractContextManager[Any] = _ANYTIME,
) -> Any:
    """Return or raise as a function does, or raise TimeoutError. What may block has a thread that nobody waits for."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            if inspect.iscoroutinefunction(function):
                return await function(**arguments)
            result, error = await asyncio.wrap_future(_in_thread(function, arguments, alone))
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(f"{name} did not answer within {timeout_s:g} s") from None
    if error is not None:
        raise error
    return result


def _in_thread(
    function: Callable[..., Any], arguments: Mapping[str, Any], alone: AbstractContextManager[Any]
) -> Future[_Outcome]:
    outcome = Future[_Outcome]()
    outcome.set_running_or_notify_cancel()  # who waits no longer does not cancel it

    def work() -> None:
        try:
            with alone:
                outcome.set_result((function(**arguments), None))
        except USER_ERRORS as error:  # not as the future's exception: that cannot be a StopIteration
            outcome.set_result((None, error))

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="tool", daemon=True).start()
    return outcome
