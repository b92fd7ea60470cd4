"""The interface of an agent loop, its default, and how one is found by name."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from grpo_dist.agents.episode import Episode
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.registry import Registry, takes
from grpo_dist.redact import redact

KEY = "actor_rollout_ref.rollout.agent.default_agent_loop"
KWARGS_KEY = "actor_rollout_ref.rollout.agent.agent_kwargs"


class AgentLoop(ABC):
    """Runs episodes.

    One object per rollout engine, made with `agent_kwargs`, runs many episodes at the same time, so what belongs to an
    episode stays in local variables of `run`. It lives on a thread of its own: a call that blocks holds up the other
    episodes, not the engine; `await asyncio.to_thread(...)` holds up nothing.

    An exception ends an attempt, not the run: the episode is sampled again from its beginning (`agent.max_attempts`).
    After the last one its group goes without it or is dropped, as long as not too many fail (`max_failure_rate`).

    Attributes:
        gives_reward: whether every episode sets `episode.reward`: no reward function is asked, no ground truth needed.
    """

    gives_reward: ClassVar[bool] = False

    @abstractmethod
    async def run(self, episode: Episode) -> None:
        """Run one episode to its end: sample with `episode.generate`, put in other text with `episode.append`."""

    @classmethod
    def rewards(cls, kwargs: Mapping[str, Any]) -> bool:
        """Whether episodes with these `agent_kwargs` set their reward."""
        return cls.gives_reward

    @classmethod
    def resolved(cls, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """`agent_kwargs` as the rollout workers get them, who run in another folder; called before the run starts."""
        return kwargs

    @classmethod
    def template_kwargs(cls, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Variables of the chat template for prompts, such as `tools`, besides data.apply_chat_template_kwargs.

        Called before the run starts, with `agent_kwargs`.
        """
        return {}

    @classmethod  # noqa: B027 - most loops need nothing of it
    def check_template(
        cls, kwargs: Mapping[str, Any], tokenizer: Any, template_kwargs: Mapping[str, Any], ends: Collection[str]
    ) -> None:
        """Check that the model's chat template has what the loop needs; called before the run starts.

        Args:
            ends: the tokens that end a turn.

        Raises:
            ConfigError: it has not.
        """

    async def cut_short(self, episode: Episode) -> None:  # noqa: B027 - most loops have nothing to do here
        """Called where a limit of time or turns has ended `run`: a loop that can may set `episode.reward`."""

    async def close(self) -> None:  # noqa: B027 - likewise
        """Called once, when the run ends: end what this object has started."""


AGENT_LOOP: Registry[Any] = Registry("agent loop", KEY)


@AGENT_LOOP.register("single_turn_agent")
class SingleTurn(AgentLoop):
    """One response to the prompt. The rollout worker samples a whole group of these in one request."""

    async def run(self, episode: Episode) -> None:
        """Sample the response."""
        await episode.generate()


def load_agent_loop(name: str, kwargs: Mapping[str, Any]) -> type[AgentLoop]:
    """The class called `name`, built-in or `pkg.module:Class` or `path/to/file.py:Class`."""
    loop = AGENT_LOOP.get(name)
    if not isinstance(loop, type) or not issubclass(loop, AgentLoop):
        raise ConfigError(f"{KEY}={name}: must be a class derived from grpo_dist.agents.AgentLoop")
    if inspect.isabstract(loop) or not inspect.iscoroutinefunction(loop.run) or not takes(loop.run, None, None):
        raise ConfigError(f"{KEY}={name}: {loop.__name__} needs `async def run(self, episode)`")
    try:
        inspect.signature(loop).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"{KWARGS_KEY}={redact(kwargs)}: {loop.__name__}: {error}") from None
    return loop
