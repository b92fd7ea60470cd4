"""Runs the episodes of a rollout worker, on a thread beside the engine's.

The user's code has an event loop of its own there, so what blocks in it delays neither the engine nor other groups'
sampling, and is found: a loop that waits for too long is cancelled, one that blocks is reported with the line it is at.

An episode that fails is run again alone, from its beginning and with its next seed, while the others of its group go
on. Once its attempts are used up, the group goes on without it, or, if too few are left, ends and cancels the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from grpo_dist.agents.base import KEY, KWARGS_KEY, AgentLoop, load_agent_loop
from grpo_dist.agents.episode import Endpoint, Episode, EpisodeEnded, Sample
from grpo_dist.agents.gateway import Gateway, Session
from grpo_dist.agents.recording import Recording
from grpo_dist.config.schema_roles import AgentConfig
from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import AgentError, ConfigError, EngineError, GrpoDistError
from grpo_dist.plugins.registry import traceback_tail
from grpo_dist.redact import redact

T = TypeVar("T")

_AGENT = "actor_rollout_ref.rollout.agent"
TIMEOUT_KEY = f"{_AGENT}.timeout_s"
# Seconds that cancelled episodes get to clean up.
CANCEL_S = 5.0
# Seconds that `stop` waits; the driver waits for a little longer.
STOP_S = 8.0

# RolloutEngine.generate
Generate = Callable[[Sequence[int], SamplingSettings, str | None], Awaitable[list[Response] | None]]
# What user code may raise. On a thread beside the main one only it raises the last two; asyncio would end the thread.
USER_ERRORS = (Exception, SystemExit, KeyboardInterrupt)


@dataclass
class _Group:
    """A group whose episodes run. `spare` is how many it can still do without, `failed` the attempts that have failed.

    Why episodes may be cancelled: the engine `aborted` the group, or we are `ending` them. Where neither is so, the
    cancellation is the user's code's own. `engine_error` has ended a request, whatever an agent makes of it.
    """

    spare: int
    failed: list[AgentError]
    aborted: bool = False
    ending: bool = False
    engine_error: EngineError | None = None

    def check(self) -> None:
        """Raise what the engine has done to the group: an agent at an endpoint sees no more of it than a status."""
        if self.engine_error is not None:
            raise self.engine_error
        if self.aborted:
            raise asyncio.CancelledError("the group was aborted")


class EpisodeRunner:
    """One agent loop and the thread it runs on.

    `generate`, the engine's, and `gateway`, its endpoint (None: there is none), are of the event loop that calls `run`.
    """

    def __init__(self, settings: AgentConfig, generate: Generate, gateway: Gateway | None = None) -> None:
        self.settings, self._generate, self._gateway = settings, generate, gateway
        self._events = asyncio.new_event_loop()
        self._groups: set[asyncio.Task[Any]] = set()  # that run
        self._stopped = False
        most = settings.max_concurrent_episodes
        self._places = asyncio.Semaphore(most) if most is not None else contextlib.nullcontext()
        self._thread = threading.Thread(target=self._serve, name="agent loop", daemon=True)
        self._loop: AgentLoop  # once it has started
        self._rewards = False

    async def start(self) -> None:
        """Make the agent loop."""
        self._thread.start()
        self._loop = await _on(self._events, self._make())

    async def run(
        self, episodes: Sequence[Episode], least: int | None = None, failed: list[AgentError] | None = None
    ) -> list[Episode]:
        """Run the episodes of a group side by side; the finished ones, in order.

        Args:
            least: how many must finish; None, or above their number: all of them.
            failed: gets the attempts that have failed, but for the one that is raised.

        Raises:
            AgentError: so many of them have used up their attempts that fewer than `least` are left.
            EngineError: the loop blocks its thread, and with it all other episodes here: this process must be replaced.
            asyncio.CancelledError: the engine aborted them, or the runner was stopped.
        """
        if self._stopped:
            raise asyncio.CancelledError("the run is over")
        here = asyncio.get_running_loop()
        spare = 0 if least is None else max(len(episodes) - least, 0)
        group = _Group(spare, [] if failed is None else failed)
        outcome = _on(self._events, self._run_all(episodes, here, group))
        try:
            while not (await asyncio.wait({outcome}, timeout=self.settings.timeout_s))[0]:
                await self._check_not_blocked()
        finally:
            outcome.cancel()
        return outcome.result()

    async def stop(self) -> None:
        """End the episodes, then the agent loop and its thread; a thread that is blocked is not waited for."""
        self._stopped = True
        self._events.call_soon_threadsafe(self._events.stop)
        await asyncio.to_thread(self._thread.join, STOP_S)

    def _serve(self) -> None:
        while not self._stopped:
            try:
                self._events.run_forever()
            except (SystemExit, KeyboardInterrupt):  # of a task that the user's code has made: it has that as its error
                continue
        with contextlib.suppress(SystemExit, KeyboardInterrupt):  # likewise, and the run is over
            self._events.run_until_complete(self._end())

    async def _end(self) -> None:
        await _cancelled(self._groups)
        if hasattr(self, "_loop"):
            with contextlib.suppress(*USER_ERRORS, asyncio.CancelledError):
                await asyncio.wait_for(self._loop.close(), CANCEL_S)
        await _cancelled(asyncio.all_tasks() - {asyncio.current_task()})  # else they complain as garbage

    async def _make(self) -> AgentLoop:
        loop_class = load_agent_loop(self.settings.default_agent_loop, self.settings.agent_kwargs)
        self._rewards = loop_class.rewards(self.settings.agent_kwargs)
        try:
            return loop_class(**self.settings.agent_kwargs)
        except USER_ERRORS as error:
            where = f"{KEY}={self.settings.default_agent_loop} with {KWARGS_KEY}={redact(self.settings.agent_kwargs)}"
            line = _last_line(traceback.extract_tb(error.__traceback__), loop_class)
            problem = f"{loop_class.__name__}() raised {type(error).__name__}: {error}{line}"
            raise ConfigError(f"{where}: {problem}") from None

    async def _run_all(
        self, episodes: Sequence[Episode], engine: asyncio.AbstractEventLoop, group: _Group
    ) -> list[Episode]:
        if (whole := asyncio.current_task()) is not None:
            self._groups.add(whole)
            whole.add_done_callback(self._groups.discard)
        tasks = [asyncio.create_task(self._run_one(episode, engine, group)) for episode in episodes]
        together = asyncio.gather(*tasks)
        together.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio may complain of it
        try:
            ended = await asyncio.shield(together)  # who cancels this cancels the tasks below
            return [episode for episode in ended if episode is not None]
        finally:
            group.ending = True
            await _cancelled(tasks)

    async def _run_one(self, episode: Episode, engine: asyncio.AbstractEventLoop, group: _Group) -> Episode | None:
        """Run an episode until an attempt succeeds; None: none is left, and its group goes on without it."""
        first: AgentError | None = None
        while True:
            try:
                return await self._attempt(episode, engine, group)
            except AgentError as error:
                failed = error
            if episode.attempt + 1 >= self.settings.max_attempts:
                break
            group.failed.append(failed)
            first, episode = first or failed, episode.next_attempt()
        same = str(first) == str(failed)
        before = "the same as at its first attempt" if same else f"At its first attempt:\n{first}"
        text = f"{failed}\n({before})" if first is not None else str(failed)
        last = AgentError(text, failed.kind, was_last=True)
        if not group.spare:
            raise last
        group.spare -= 1
        group.failed.append(last)
        return None

    async def _attempt(self, episode: Episode, engine: asyncio.AbstractEventLoop, group: _Group) -> Episode:
        """Run an episode from its beginning."""
        outside = whole = asyncio.timeout(None)
        kind, problem = "error", ""
        try:
            async with self._places:  # its time begins once it has one
                outside = asyncio.timeout(self.settings.timeout_s)
                whole = asyncio.timeout(self.settings.episode_timeout_s)
                async with whole, outside:
                    sample = self._sampler(episode.row.uid, engine, outside, group)
                    opener = functools.partial(self._endpoint, engine, sample)
                    episode.connect(sample, None if self._gateway is None else opener)
                    await self._loop.run(episode)
        except GrpoDistError:
            raise  # the engine's
        except EpisodeEnded:
            kind = "turns"
            problem = f"run() asked for a turn more than {_AGENT}.max_assistant_turns, or there is room for"
        except asyncio.CancelledError as error:
            if group.aborted or group.ending:
                raise
            problem = f"run() let a cancellation of its own out, CancelledError{self._line_of(error)}; catch it there"
        except USER_ERRORS as error:
            limit = "timeout_s" if outside.expired() else "episode_timeout_s" if whole.expired() else ""
            if limit:
                seconds, where = getattr(self.settings, limit), " outside the engine" * outside.expired()
                kind, problem = "timeout", f"run() did not end within {_AGENT}.{limit}={seconds:g} s{where}"
            else:
                problem = f"run() raised {type(error).__name__}: {error}{self._line_of(error)}\n{traceback_tail(error)}"
        group.check()
        if kind != "error":
            await self._cut_short(episode)
        scored = bool(episode.num_turns) and (episode.reward is not None or not self._rewards)
        if not problem or (kind != "error" and scored):
            kind, problem = self._fault(episode)
        if problem:
            where = f"prompt {episode.row.uid}, episode {episode.index}, after turn {episode.num_turns}"
            raise AgentError(f"agent loop {self.settings.default_agent_loop} ({where}): {problem}", kind)
        return episode

    async def _cut_short(self, episode: Episode) -> None:
        """Ask the loop for the reward of an episode that a limit has ended."""
        episode.truncated = True
        with contextlib.suppress(*USER_ERRORS):  # then there is none
            async with asyncio.timeout(self.settings.timeout_s):
                await self._loop.cut_short(episode)

    def _fault(self, episode: Episode) -> tuple[str, str]:
        """Return what is wrong with an episode whose loop has ended: the kind, and why; "": nothing."""
        if episode.failure is not None:
            name = "reject" if episode.failure_kind == "rejected" else "fail"
            return episode.failure_kind, f"episode.{name}: {episode.failure}"
        try:
            episode.response()
            if episode.outcome() is None and self._rewards:
                return "error", "gives_reward is true, and run() has set no episode.reward"
        except Exception as error:  # noqa: BLE001 - what a loop has set may be anything
            return "error", f"{type(error).__name__}: {error}"
        return "error", ""

    def _sampler(self, uid: str, engine: asyncio.AbstractEventLoop, limit: asyncio.Timeout, group: _Group) -> Sample:
        """Samples on the engine's event loop; the time that takes, waiting included, is not the agent loop's."""

        async def request(prompt: list[int], sampling: SamplingSettings) -> Response | None:
            try:
                responses = await self._generate(prompt, sampling, uid)
            except EngineError as error:
                group.engine_error = error
                raise
            group.aborted = group.aborted or responses is None
            return responses[0] if responses is not None else None

        left, under_way = 0.0, 0  # calls at an endpoint may overlap

        async def sample(prompt: list[int], sampling: SamplingSettings) -> Response | None:
            nonlocal left, under_way
            if group.ending or self._stopped:  # a task that the user's code left running, a thread that was blocked
                raise asyncio.CancelledError("the episode is over")
            if not under_way and (when := limit.when()) is not None:
                left = when - self._events.time()
                limit.reschedule(None)
            under_way += 1
            try:
                return await _on(engine, request(prompt, sampling))
            finally:
                under_way -= 1
                if not under_way and not limit.expired():
                    limit.reschedule(self._events.time() + left)

        return sample

    @contextlib.asynccontextmanager
    async def _endpoint(
        self, engine: asyncio.AbstractEventLoop, sample: Sample, recording: Recording
    ) -> AsyncIterator[Endpoint]:
        """An endpoint on the engine's event loop; its calls go by way of `sample`, on this one."""
        gateway, here = self._gateway, self._events
        assert gateway is not None

        async def sample_here(prompt: list[int], sampling: SamplingSettings) -> Response | None:
            if self._stopped:  # nobody would run it
                return None
            return await _on(here, sample(prompt, sampling))

        session = Session(recording, sample_here)
        try:
            await _on(engine, gateway.open(session))
            yield Endpoint(f"{gateway.url}/v1", session.token)
        finally:  # whoever cancels the wait for it does not cancel the end of the session
            await asyncio.shield(_on(engine, gateway.close(session)))

    async def _check_not_blocked(self) -> None:
        if (await asyncio.wait({_on(self._events, asyncio.sleep(0))}, timeout=self.settings.timeout_s))[0]:
            return
        frame = sys._current_frames().get(self._thread.ident or 0)
        line = _last_line(traceback.extract_stack(frame), type(self._loop))
        raise EngineError(
            f"agent loop {self.settings.default_agent_loop}: run() blocks its thread for more than {TIMEOUT_KEY}="
            f"{self.settings.timeout_s:g} s{line}; await there, or use asyncio.to_thread"
        )

    def _line_of(self, error: BaseException) -> str:
        """Where an exception was raised, in the files of the user's class if it passes there."""
        return _last_line(traceback.extract_tb(error.__traceback__), type(self._loop))


def _on(events: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """What a coroutine gives on the event loop of another thread, to be awaited on this one's."""
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, events))


async def _cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and give them time to clean up."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CANCEL_S)


def _last_line(stack: Sequence[traceback.FrameSummary], loop_class: type) -> str:
    """The last frame in the folder of the user's class, else the last one at all."""
    folder = str(Path(inspect.getfile(loop_class)).parent)
    near = [entry for entry in stack if entry.filename.startswith(folder)]
    own = [entry for entry in near if "site-packages" not in entry.filename.removeprefix(folder)]
    return f", at {(own or stack)[-1].filename}:{(own or stack)[-1].lineno}" if stack else ""
