"""Agents and environments that run elsewhere: in another interpreter, or behind an HTTP server.

They need nothing of this package. For each episode they get an OpenAI-compatible endpoint and a token, play with
whatever loop, tools and packages they have, and answer with the reward: as a function, by lines or by bodies of POSTs
(docs/environments.md#agents-that-know-nothing-of-training).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from grpo_dist.agents import child_loop
from grpo_dist.agents.base import AGENT_LOOP, KWARGS_KEY, AgentLoop
from grpo_dist.agents.episode import Episode
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.names import parse_code
from grpo_dist.plugins.registry import described
from grpo_dist.redact import redact, redact_text
from grpo_dist.terminal import show

END_S = 2.0  # that a process has to end after it has closed its output
SERVER_S = 60.0  # that an episode waits for a server that is not there, or says 503: it may be starting again
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0  # between two questions whether it is there
LONGEST_LINE = 16 << 20  # bytes
_ANSWER = {"id", "ok", "reward", "step_rewards", "agent_rewards", "metrics", "truncated", "error"}


@AGENT_LOOP.register("external")
class External(AgentLoop):
    """Has episodes played by a function of another interpreter, by a program, or by a server.

    Beside each rollout engine runs one process, which plays all of its episodes.

    Args:
        play: the function, as `path/to/file.py:play` or `pkg.module:play`; only its file is used.
        python: the interpreter that has its packages; None: this one.
        command: in place of a function, a program with its arguments.
        url: in place of both, a server's address. On another machine it needs an endpoint that it can reach.
    """

    gives_reward = True

    def __init__(
        self,
        play: str | None = None,
        python: str | None = None,
        command: Sequence[str] | None = None,
        url: str | None = None,
    ) -> None:
        if [play, command, url].count(None) != 2:
            raise ConfigError(
                f"{KWARGS_KEY}: give one of play=FILE.py:FUNCTION, command=[PROGRAM, ARGUMENT, ...] and url=http://..."
            )
        if play is not None:
            command = [python or sys.executable, child_loop.__file__, play]
        self._player: _Command | _Server = _Command(command or ()) if url is None else _Server(url)

    @classmethod
    def resolved(cls, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """`agent_kwargs` in which `play` names a file by its whole path."""
        named = kwargs.get("play")
        if named is None:
            return kwargs
        code = parse_code(str(named))
        file = code.source if code.source.endswith(".py") else _file_of(code.source)
        if not code.attribute or not file or not Path(file).is_file():
            raise ConfigError(f"{KWARGS_KEY}.play={named!r}: there is no such function; name it as FILE.py:FUNCTION")
        return {**kwargs, "play": f"{Path(file).absolute()}:{code.attribute}"}

    async def run(self, episode: Episode) -> None:
        """Have the episode played; see the module."""
        row = episode.row
        task = {**row.extra_info, "messages": list(row.messages), "data_source": row.data_source}
        async with episode.endpoint() as (base_url, token):
            answer = await self._player.play({"task": task, "base_url": base_url, "token": token})
        unknown = sorted(set(answer) - _ANSWER)
        if unknown or not isinstance(answer.get("ok"), bool):
            raise ValueError(f"an answer needs ok (true or false), and may have {', '.join(sorted(_ANSWER))}: {answer}")
        if not answer["ok"]:
            episode.fail(str(answer.get("error", "the answer says ok=false, and no error")))
            return
        episode.reward = answer.get("reward")
        for turn, value in enumerate(answer.get("step_rewards") or ()):
            if value is not None:
                episode.add_step_reward(value, turn=turn)
        for name, value in (answer.get("agent_rewards") or {}).items():
            episode.add_step_reward(value, agent_name=name)
        episode.metrics |= answer.get("metrics") or {}
        episode.truncated = episode.truncated or bool(answer.get("truncated"))

    async def close(self) -> None:
        """End the command, or the connections to the server."""
        await self._player.close()


class _Server:
    def __init__(self, url: str) -> None:
        self._url = url
        # The limits are the episode's; no proxy, which would have its own, and see the token.
        no_limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(timeout=None, limits=no_limits, trust_env=False)

    async def play(self, message: Mapping[str, Any]) -> dict[str, Any]:
        waited, wait = 0.0, FIRST_WAIT_S
        while True:
            try:
                answer = await self._client.post(self._url, json=dict(message))
                problem = f"status {answer.status_code}: {answer.text[:500]}"
                if answer.is_success:
                    if isinstance(played := json.loads(answer.text), dict):
                        return played
                    raise ValueError(f"{self._url}: an answer is a JSON object, not {described(played)}")
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    raise RuntimeError(f"{redact_text(self._url)}: {problem}")
            except httpx.ConnectError as error:  # so the episode has not begun, and this is no failure of it
                problem = f"{type(error).__name__}: {error}"
            if waited >= SERVER_S:
                raise RuntimeError(f"{redact_text(self._url)}: no server for {SERVER_S:g} s: {problem}")
            pause = wait * random.uniform(0.5, 1.0)  # so that those who wait do not all come at once
            await asyncio.sleep(pause)
            waited, wait = waited + pause, min(2 * wait, LONGEST_WAIT_S)

    async def close(self) -> None:
        await self._client.aclose()


class _Command:
    """A process that is started with the first episode, and again if it has ended."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [str(part) for part in command]
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def play(self, message: Mapping[str, Any]) -> dict[str, Any]:
        async with self._starting:
            if self._process is None:
                guarded = [sys.executable, "-m", "grpo_dist.supervisor", *self._command]
                pipe = asyncio.subprocess.PIPE
                started = asyncio.create_subprocess_exec(*guarded, stdin=pipe, stdout=pipe, limit=LONGEST_LINE)
                self._process = await started
                self._reading = asyncio.create_task(self._read(self._process))
        number = next(self._numbers)
        answered = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._write({"id": number, **message})
            return await answered
        except asyncio.CancelledError:
            self._write({"id": number, "cancel": True})
            raise
        finally:
            self._open.pop(number, None)

    async def close(self) -> None:
        if self._process is not None and self._reading is not None:
            self._process.terminate()
            await self._reading

    def _write(self, message: Mapping[str, Any]) -> None:
        """Without waiting for it to be read; whether the process has ended, `_read` says."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(message, default=str).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Take in answers until the process ends; what else it writes is printed."""
        assert process.stdout is not None
        why = "closed its output"
        try:
            while line := await process.stdout.readline():
                answer = _answer_in(line)
                if answer is None:
                    show(line.decode(errors="replace"))
                elif (asked := self._open.get(answer["id"])) is not None and not asked.done():
                    asked.set_result(answer)
        except ValueError as error:  # a line that is too long
            why = str(error)
        with contextlib.suppress(TimeoutError):  # it may be about to end by itself
            await asyncio.wait_for(process.wait(), END_S)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        code = await process.wait()
        self._process = None
        for asked in self._open.values():
            if not asked.done():
                asked.set_exception(RuntimeError(f"{' '.join(redact(self._command))}: {why}, exit code {code}"))


def _answer_in(line: bytes) -> dict[str, Any] | None:
    """The answer that a line is; None: it is something else."""
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(line)
        if isinstance(answer, dict) and isinstance(answer.get("id"), int):
            return answer
    return None


def _file_of(module: str) -> str | None:
    """The file of a module, which is not imported; its packages are."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module)
        return spec.origin if spec is not None else None
    return None
