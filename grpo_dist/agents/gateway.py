"""The endpoint of a rollout worker: one HTTP server, on which every episode that asks for it has a token of its own.

Who asks is told by the token (bearer, `x-api-key`, or `/s/TOKEN` before the path), and which of its agents by
`/agent/NAME` there. An episode's requests are sampled by the policy in training, with the run's sampling settings and
the weights of the moment, and recorded (recording.py). Knows no other routes than `ROUTES`, and answers 401 to whoever
has no token: so it may listen where other machines reach it (`endpoint_host`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from grpo_dist.agents.episode import Sample
from grpo_dist.agents.recording import Recording
from grpo_dist.algorithms.advantage.inputs import name_fault
from grpo_dist.engines.base import AppSample, RequestRefused, Response
from grpo_dist.engines.rendezvous import LOOPBACK, own_ip
from grpo_dist.errors import ConfigError

# Those whose prompt a chat template renders, and the others.
CHAT_ROUTES = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages"})
ROUTES = CHAT_ROUTES | {"/v1/completions", "/v1/models", "/v1/messages/count_tokens"}
MAX_BODY = 32 << 20  # bytes
MOST_REQUESTS = 64  # of an episode at the same time, each with a body in memory
_PATH = re.compile(r"(?:/s/([^/]*))?(?:/agent/([^/]*))?(.*)", re.DOTALL)  # a token for clients whose key is fixed
ANYWHERE = "192.0.2.1", 9  # nobody's (RFC 5737): the way there is the default route
CANCEL_S = 5.0  # that requests get to end once their session is closed
SWEEP_S = 10  # a connection without a complete head at two of these, one after the other, is closed


@dataclass(eq=False)
class Session:
    """An episode at the endpoint."""

    recording: Recording
    sample: Sample
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


# Whose request it is, its route, and the agent's name.
_ASKING: ContextVar[tuple[Session, str, str] | None] = ContextVar("asking", default=None)


def socket_at(host: str, node_ip: str) -> socket.socket:
    """Bind a socket to a free port of `host`: an address of this machine, or 0.0.0.0 or :: for all that it has.

    "auto" is `node_ip`, by which Ray knows this machine, or if that is loopback the address on its default route.

    Raises:
        ConfigError: this machine has no such address.
    """
    try:
        own = host if host != "auto" else own_ip(*ANYWHERE) if node_ip == LOOPBACK else node_ip
        bound = socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET)
        bound.bind((own, 0))
        return bound
    except OSError as error:
        raise ConfigError(
            f"actor_rollout_ref.rollout.agent.endpoint_host={host}: {socket.gethostname()} has no such address "
            f"({error}); set it to one that `ip address` shows there, or on a cluster to auto"
        ) from None


class Gateway:
    """The server. Everything here runs on one event loop.

    It listens at `bound` from the first session on; `advertised_host` is the host in its `url`, None: that address.
    """

    def __init__(
        self, make_app: Callable[[AppSample], Awaitable[Any]], bound: socket.socket, advertised_host: str | None
    ) -> None:
        self._make_app, self._bound = make_app, bound
        address, port, *_ = bound.getsockname()
        host = advertised_host or address
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._sessions: dict[str, Session] = {}
        self._starting: asyncio.Task[None] | None = None
        self._waiting: dict[Any, Any] = {}  # at the last sweep: connections without a request, and their last one

    async def open(self, session: Session) -> None:
        """Let a session's token in; starts the server, if it does not run yet."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)
        self._sessions[session.token] = session

    async def close(self, session: Session) -> None:
        """End a session, what is under way of it, and its answers that nobody reads."""
        if self._sessions.pop(session.token, None) is None:
            return
        for task in session.tasks:
            task.cancel()
        if session.tasks:
            await asyncio.wait(session.tasks, timeout=CANCEL_S)
        for connection in self._connections():
            at = connection.cycle
            if at is not None and at.scope.get("grpo_dist.session") is session:  # another's request may be next on it
                if not at.response_complete or connection.transport.get_write_buffer_size():
                    connection.transport.abort()

    async def stop(self) -> None:
        """End the server."""
        if self._starting is None:
            self._bound.close()
            return
        await asyncio.wait({self._starting})
        if self._starting.exception() is None:
            for session in list(self._sessions.values()):
                await self.close(session)
            self._server.should_exit = self._server.force_exit = True
            await self._serving
            for connection in self._connections():
                connection.transport.abort()

    async def _start(self) -> None:
        import uvicorn

        class Server(uvicorn.Server):
            capture_signals: Any = contextlib.nullcontext  # they are this process's

        self._app = await self._make_app(self._sample)
        config = uvicorn.Config(
            self,
            http="h11",  # which bounds a request's head; httptools does not
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_level=logging.CRITICAL,
            access_log=False,
            callback_notify=self._sweep,
            timeout_notify=SWEEP_S,
        )
        self._server = Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._bound]))
        while not self._server.started:
            await asyncio.sleep(0.01)

    def _connections(self) -> list[Any]:
        return list(self._server.server_state.connections)

    async def _sweep(self) -> None:
        """Close the connections that send no request, or the next one's head ever so slowly, or read no answer."""
        before = self._waiting
        idle = [other for other in self._connections() if other.cycle is None or other.cycle.response_complete]
        self._waiting = {other: other.cycle for other in idle}
        for connection, last in self._waiting.items():
            if before.get(connection, self) is last:
                connection.transport.abort()

    async def _sample(self, prompt: list[int], max_tokens: int | None, stop: Sequence[str]) -> Response:
        asking = _ASKING.get()
        assert asking is not None, "the app is reached through __call__ only"
        session, route, agent_name = asking
        if session.token not in self._sessions:  # the app has work of its own that outlives a request
            raise RequestRefused("the episode is over")
        call, sampling = session.recording.begin(prompt, is_chat=route in CHAT_ROUTES, max_tokens=max_tokens, stop=stop)
        call.agent_name = agent_name
        response = None
        try:
            response = await session.sample(call.prompt_ids, sampling)
        finally:
            session.recording.end(call, response)
        if response is None:
            raise RequestRefused("the episode was aborted")
        return response

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI app: who asks, and whether they may; then vLLM's app."""
        if scope["type"] != "http":
            return
        token, agent_name, path = _asked(scope)
        session = self._sessions.get(token)
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if session is None:
            await _answer(send, 401, "no such token, or its episode is over")
        elif path not in ROUTES:
            await _answer(send, 404, f"{path} is not served in training; there are {', '.join(sorted(ROUTES))}")
        elif fault := name_fault(agent_name):
            await _answer(send, 400, fault)
        elif not length.isdigit() or int(length) > MAX_BODY:
            await _answer(send, 413, f"a request may have {MAX_BODY} bytes")
        elif len(session.tasks) >= MOST_REQUESTS:  # clients try again
            await _answer(send, 429, f"{MOST_REQUESTS} requests of the episode are under way already")
        else:
            _ASKING.set((session, path, agent_name))
            scope["grpo_dist.session"] = session  # tells `close` whose the connection is
            work = asyncio.create_task(
                self._app(scope | {"path": path, "raw_path": path.encode()}, _limited(receive), send)
            )
            session.tasks.add(work)
            try:
                await work
            except asyncio.CancelledError:  # the session was closed; the connection ends with it
                if not work.cancelled():
                    work.cancel()
                    raise
            finally:
                session.tasks.discard(work)


def _asked(scope: Any) -> tuple[str, str, str]:
    """Return token, agent's name and route of a request."""
    headers = dict(scope["headers"])
    token = headers.get(b"authorization", b"").removeprefix(b"Bearer ") or headers.get(b"x-api-key", b"")
    in_path, agent_name, path = _PATH.findall(scope["path"])[0]
    return in_path or token.decode("latin-1"), agent_name, path


def _limited(receive: Any) -> Any:
    """`receive`, which ends a request whose body is longer than it may be, whatever its header says."""
    left = MAX_BODY

    async def limited() -> Any:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        return message if left >= 0 else {"type": "http.disconnect"}

    return limited


async def _answer(send: Any, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
