"""vLLM's own OpenAI server, over an engine as a run would start it: clients are sampled for as they ask.

`vllm serve` looks for an installed package named vllm, and so fails with the build for CPU; this is what it runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from grpo_dist import hosts
from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.rendezvous import LOOPBACK
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.starting import plain_errors, prepare, tied_core, wait_until_free
from grpo_dist.errors import ConfigError, EngineError

KEY_VARIABLE = "VLLM_API_KEY"
BREAK_OFF_S = 1  # until answers under way are broken off, once the engine has ended
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Server:
    """A server that answers: its URL, without a path, and a task that is done if it has ended by itself."""

    url: str
    ended: asyncio.Task[None]


def listen(host: str, port: int) -> socket.socket:
    """A socket to serve at; connections wait in it until the server answers."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror}; name another port (0: a free one), and an address of this "
            "machine"
        ) from None


@asynccontextmanager
async def serving(
    settings: EngineSettings,
    usage: Usage,
    listening: socket.socket,
    *,
    name: str,
    token: str = "",
    more: Sequence[str] = (),
) -> AsyncIterator[Server]:
    """Serve while the block lasts, which begins when the server answers. SIGINT and SIGTERM cancel the block.

    `listening` is where to serve; the other arguments are those of `openai_app.server_arguments`.

    Raises:
        ConfigError: vLLM is not installed, or refuses the settings or an option.
        EngineError: it does not start, or its GPUs are full.
        KeyboardInterrupt: SIGINT or SIGTERM came before it answered.
    """
    with prepare(settings.device) as folder, _interrupted(), listening:
        with plain_errors():
            from vllm.entrypoints.launchers.api_server.entry import run_server_worker

            from grpo_dist.engines.vllm.openai_app import server_arguments

            arguments = server_arguments(settings, usage, name=name, folder=folder, token=token, more=more)
        os.environ.pop(KEY_VARIABLE, None)  # vLLM would guard a part of its routes with it
        arguments.host, arguments.port = listening.getsockname()[:2]
        url = _url(arguments)
        if settings.device == "cuda":
            await wait_until_free(settings)
        # streams would wait for ever for tokens of an engine that has ended
        more_of_uvicorn = {"timeout_graceful_shutdown": BREAK_OFF_S, "http": TimedProtocol}
        serve = run_server_worker(url, listening, arguments, **more_of_uvicorn)
        ended = asyncio.create_task(serve)
        try:
            await _answering(url, ended)
            with _cancelled():
                yield Server(url, ended)
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)


async def _answering(url: str, ended: asyncio.Task[None]) -> None:
    async with httpx.AsyncClient(verify=False, trust_env=False, timeout=None) as client:  # of this process itself
        asked = asyncio.create_task(client.get(f"{url}/health"))
        try:
            with plain_errors(), tied_core():
                await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    await ended
                    raise EngineError("vLLM's server has ended")
                (await asked).raise_for_status()
        except RuntimeError as error:
            raise EngineError(str(error)) from error
        finally:
            asked.cancel()


def _url(arguments: Namespace) -> str:
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(arguments.host, arguments.host)
    return f"http{'s' if arguments.ssl_certfile else ''}://{f'[{host}]' if ':' in host else host}:{arguments.port}"


@contextmanager
def _interrupted() -> Iterator[None]:
    """Signals interrupt this block wherever it is: an engine starts without a look at the event loop."""

    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _cancelled() -> Iterator[None]:
    """The first signal cancels this block, and so ends the server in order; a second one ends the process."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


class TimedProtocol(HttpToolsProtocol):
    """uvicorn's connection, with a limit for each request, from its first byte, or the connection's, to its last."""

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        """Take in data, perhaps of the next request."""
        if self._limit is None:
            self._begin()
        super().data_received(data)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._end()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to another protocol."""
        self._end()
        super().handle_websocket_upgrade()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._end()
        super().connection_lost(exc)

    def _begin(self) -> None:
        self._limit = self.loop.call_later(hosts.REQUEST_S, self._close)

    def _end(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _close(self) -> None:
        self._limit = None
        is_answering = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if not is_answering:
            self.transport.close()
