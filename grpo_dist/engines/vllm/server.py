"""vLLM's own OpenAI server, over an engine as a run would start it, and what stands before its routes: who may ask, and
what the run says where a request says nothing.

`vllm serve` looks for an installed package named vllm, and so fails with the build for CPU; this is what it runs. vLLM
has no default for stop texts or the system prompt, its default for the length is a limit that a client cannot raise,
and its own token guards `/v1` alone, for clients that send it as bearer token. Imports vLLM when a server starts.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import signal
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from grpo_dist import hosts
from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.rendezvous import LOOPBACK
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.starting import plain_errors, prepare, tied_core
from grpo_dist.errors import ConfigError, EngineError
from grpo_dist.hosts import is_this_machine

MODEL = "policy"  # the name under which it is served
OPEN_PATH = "/health"  # answers everybody
SYSTEM_ROLES = ("system", "developer")
REQUEST: ContextVar[dict[str, Any]] = ContextVar("request")  # the body as the client sent it
GOES_ON = {"add_generation_prompt": False, "continue_final_message": True}


@dataclass(frozen=True)
class Form:
    """The way in which the requests of a route say what a run says too.

    Attributes:
        max_tokens: keys of the response's length; the last one is set.
        stop: key of the texts that end a response.
        conversation: key of the messages; "": there are none.
        system: key of the system prompt; "": it is the first message.
        may_go_on: whether a request can say that the policy goes on from the last message.
    """

    max_tokens: tuple[str, ...] = ()
    stop: str = "stop"
    conversation: str = ""
    system: str = ""
    may_go_on: bool = False


_MESSAGES = Form(("max_tokens",), "stop_sequences", "messages", "system")
FORMS = {
    "/v1/chat/completions": Form(("max_completion_tokens", "max_tokens"), "stop", "messages", may_go_on=True),
    "/v1/responses": Form(("max_output_tokens",), "stop", "input", "instructions"),
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _MESSAGES,
    "/v1/completions": Form(("max_tokens",)),
}


@dataclass(frozen=True)
class FrontSettings:
    """The settings of the front: how the run asks, and the token; "": everybody may ask."""

    usage: Usage = field(default_factory=Usage)
    token: str = ""


class Front:
    """The ASGI middleware. vLLM gives it nothing but the app, whose arguments have the settings as `front`."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket"):
            settings: FrontSettings = scope["app"].state.args.front
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if not settings.token and not is_this_machine(host):
                await _refuse(
                    403, f"Host {host!r} is no name of this machine: ask localhost, or give the server a token"
                )(scope, receive, send)
                return
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if not (path == OPEN_PATH or scope.get("method") == "OPTIONS" or may_ask(scope["headers"], settings.token)):
                message = "the token is missing or wrong: Authorization: Bearer TOKEN, or x-api-key: TOKEN"
                await _refuse(401, message)(scope, receive, send)
                return
            if path in FORMS and scope.get("method") == "POST":
                try:
                    scope, receive = await _filled(scope, receive, FORMS[path], settings.usage)
                except ClientDisconnect:  # or who stands before this has cut off a long body
                    refusal = _refuse(413, "the body has not come to its end", "invalid_request_error")
                    await refusal(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def put_front(arguments: Namespace, settings: FrontSettings) -> None:
    """Have the app of these arguments, of vLLM's server, stand behind the front."""
    arguments.front = settings
    arguments.middleware = [*arguments.middleware, f"{Front.__module__}.{Front.__qualname__}"]  # the last is the first


def _refuse(code: int, message: str, kind: str = "authentication_error") -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "code": code}}, code)


def may_ask(headers: list[tuple[bytes, bytes]], token: str) -> bool:
    """Tell if a request has the token, as OpenAI's clients send it or as Anthropic's do."""
    given = dict(headers)
    scheme, _, bearer = given.get(b"authorization", b"").partition(b" ")
    keys = [given.get(b"x-api-key", b""), bearer if scheme.lower() == b"bearer" else b""]
    return not token or any([hmac.compare_digest(key, token.encode()) for key in keys])


def as_the_run_asks(body: Mapping[str, Any], form: Form, usage: Usage) -> dict[str, Any]:
    """A request with the run's sampling and system prompt where it has none of its own.

    Where it ends in a turn of the assistant and does not say otherwise, the policy goes on from there, as in training.
    """
    filled = dict(body)
    for name, value in usage.sampling.items():
        keys = {"max_tokens": form.max_tokens, "stop": (form.stop,)}.get(name, (name,))
        if value not in ((), []) and all(filled.get(key) is None for key in keys):
            filled[keys[-1]] = value
    turns = filled.get(form.conversation)
    listed = turns if isinstance(turns, list) else []
    if form.may_go_on and _is_begun(listed) and not filled.keys() & GOES_ON.keys():
        filled |= GOES_ON
    has_system = any(isinstance(turn, dict) and turn.get("role") in SYSTEM_ROLES for turn in listed)
    if usage.system_prompt is None or has_system or turns is None:
        return filled
    if not form.system:
        filled[form.conversation] = [{"role": "system", "content": usage.system_prompt}, *listed]
    elif filled.get(form.system) is None:
        filled[form.system] = usage.system_prompt
    return filled


def _is_begun(turns: list[Any]) -> bool:
    """Say if a conversation ends in a turn of the assistant that has nothing but text."""
    last = turns[-1] if turns and isinstance(turns[-1], dict) else {}
    return last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")


async def _filled(scope: Any, receive: Any, form: Form, usage: Usage) -> tuple[Any, Any]:
    """The scope and the `receive` of a request whose body is filled; vLLM answers what is no JSON object."""
    body = await Request(scope, receive).body()
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = None
    if isinstance(said, dict):
        REQUEST.set(said)
        body = json.dumps(as_the_run_asks(said, form, usage)).encode()
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Any:
        return messages.pop() if messages else await receive()

    return scope | {"headers": [*headers, (b"content-length", str(len(body)).encode())]}, read


# --- the server -------------------------------------------------------------------------------------------------------
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
            from grpo_dist.engines.vllm.starting import wait_until_free

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
