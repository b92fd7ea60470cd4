"""A class of the user's as an environment: one object per episode, whose public methods are tools of the policy.

`reset` gets the row's columns, and what it returns stands behind the row's last message. `get_reward` and `close` are
optional. The form is that of TRL's `environment_factory`, but that each episode has a new object, and that the episode
ends where the object's attribute `done` is true. The tool agent (tool_agent.py) plays it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

from grpo_dist.agents.base import KWARGS_KEY
from grpo_dist.agents.episode import Episode, finite
from grpo_dist.agents.runner import USER_ERRORS
from grpo_dist.agents.tools import Tool, returned
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.registry import described, load_attribute, takes

ENVIRONMENT_KEY = f"{KWARGS_KEY}.environment"
_OURS = ("reset", "get_reward", "close")  # methods that are no tools


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

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Environment]:
        """In the block, a new environment; it is closed however the block ends."""
        made = Environment(self, await returned(self.made_of, {}, self.timeout_s, self.made_of.__name__))
        try:
            yield made
        except BaseException:  # of which the cause is told, and not what close() makes of it
            with contextlib.suppress(*USER_ERRORS):
                await made.call("close")
            raise
        await made.call("close")


class Environment:
    """The environment of one episode. Of its methods that are not async one runs at a time, in a thread."""

    def __init__(self, kind: EnvironmentClass, made: Any) -> None:
        self._kind, self._made, self._lock = kind, made, threading.Lock()

    @property
    def tools(self) -> Mapping[str, Tool]:
        """Its tools by name."""
        tools = self._kind.tools.items()
        return {name: replace(tool, function=self._alone(tool.function, self._made)) for name, tool in tools}

    @property
    def done(self) -> bool:
        """Whether it has ended the episode."""
        return bool(getattr(self._made, "done", False))

    async def call(self, name: str, **arguments: Any) -> Any:
        """Call a method that is no tool; None where the class has none of that name."""
        if (method := getattr(self._made, name, None)) is None:
            return None
        where = f"{type(self._made).__name__}.{name}()"
        return await returned(self._alone(method), arguments, self._kind.timeout_s, where)

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

    def _alone(self, function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):
            return functools.partial(function, *first)

        def one_at_a_time(**arguments: Any) -> Any:
            with self._lock:  # one that was given up may still run
                return function(*first, **arguments)

        return one_at_a_time
