"""Where the server listens, and how long a request may take. tests/cli/test_serve.py starts one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from grpo_dist import hosts
from grpo_dist.engines.vllm.server import TimedProtocol, listen
from grpo_dist.errors import ConfigError
from tests.messages import refuses


def test_a_taken_port_is_refused_at_once() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert port > 0
        with refuses(ConfigError, "--host 127.0.0.1", f"--port {port}", 0):
            listen("127.0.0.1", port)
    with listen("127.0.0.1", port) as again:
        assert again.family is socket.AF_INET


def test_an_address_of_another_machine_is_refused() -> None:
    with refuses(ConfigError, "--host 192.0.2.1", "--port 0"):  # for documentation, RFC 5737
        listen("192.0.2.1", 0)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connected(test: Callable[[Connection], Awaitable[None]], answer_s: float = 0.0) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(answer_s)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run() -> None:
        server = uvicorn.Server(uvicorn.Config(app, port=0, http=TimedProtocol, lifespan="off", log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        connection = await asyncio.open_connection("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
        await asyncio.wait_for(test(connection), 30)
        connection[1].close()
        server.should_exit = True
        await serving

    asyncio.run(run())


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc"])
def test_a_request_that_does_not_come(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "REQUEST_S", 0.2)

    async def wait(connection: Connection) -> None:
        connection[1].write(sent)
        assert b"200" not in await connection[0].read()  # until it is closed

    connected(wait)


def test_an_answer_may_take_longer_and_the_next_request_has_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "REQUEST_S", 0.2)

    async def ask_twice(connection: Connection) -> None:
        for _ in range(2):
            connection[1].write(GET)
            assert (await connection[0].readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        connection[1].write(GET[:9])
        assert await connection[0].read() == b""

    connected(ask_twice, answer_s=0.5)
