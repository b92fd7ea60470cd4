"""What a program on this machine may try at the endpoint: other episodes, other routes, too much, and too slowly."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from grpo_dist.agents import gateway as module
from grpo_dist.agents.gateway import Gateway, Session
from grpo_dist.agents.recording import Recording
from grpo_dist.engines.base import RequestRefused
from tests.agents.gateways import CHAT, App, opened, post, serving, upper


def port(gateway: Gateway) -> int:
    return int(gateway.url.rpartition(":")[2])


async def send(gateway: Gateway, *lines: str, end: str = "\r\n\r\n") -> tuple[asyncio.StreamReader, Any]:
    """Lines as they are, on a connection of their own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port(gateway))
    writer.write(("\r\n".join(lines) + end).encode())
    return reader, writer


async def status(gateway: Gateway, path: str, token: str, *headers: str, method: str = "POST") -> int:
    """Of a request with this path as it is: clients would tidy it up. 0: the connection was closed."""
    ours = ("host: x", f"authorization: Bearer {token}", "content-length: 0", "connection: close")
    reader, writer = await send(gateway, f"{method} {path} HTTP/1.1", *ours, *headers)
    answer = await reader.read()
    writer.close()
    return int(answer.split(maxsplit=2)[1]) if answer else 0


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


class Watched(App):
    """Remembers what reached it."""

    def __init__(self, sample: Any) -> None:
        super().__init__(sample)
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        await super().__call__(scope, receive, send)


ODD = [
    f"/{CHAT}",
    f"/.{CHAT}",
    f"{CHAT}/",
    f"{CHAT}/../../../metrics",
    "/v1/../metrics",
    "/v1/%2e%2e/metrics",
    "/%2fmetrics",
    f"{CHAT}%00",
    f"{CHAT};/metrics",
    "/V1/CHAT/COMPLETIONS",
    "/v1/responses/resp_1",
    "/s/",
    "/s//",
    "http://x/metrics",
    "*",
]


async def test_odd_paths_lead_nowhere() -> None:
    async with serving(Watched) as gateway:
        session, other = await opened(gateway), await opened(gateway)
        within = f"/s/{session.token}"
        for path in (*ODD, *(within + path for path in ODD), within, f"{within}/s/{other.token}{CHAT}"):
            assert await status(gateway, path, session.token) in (400, 401, 404), path
        assert gateway._app.paths == []
        assert await status(gateway, "/v1/%63hat/completions?x=/metrics", session.token) == 200
        assert gateway._app.paths == [CHAT], "it sees the path that was checked"


async def test_the_token_in_the_path_is_whose_the_request_is() -> None:
    async with serving() as gateway:
        one, two = await opened(gateway), await opened(gateway)
        assert (await post(gateway, f"/s/{one.token}{CHAT}", two.token)).status_code == 200
        assert [len(each.recording.calls) for each in (one, two)] == [1, 0]
        await gateway.close(one)
        assert (await post(gateway, f"/s/{one.token}{CHAT}", two.token)).status_code == 401
        assert two.recording.calls == []


async def test_a_token_cannot_be_guessed_and_is_written_nowhere(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)

    async def fails(prompt: Any, sampling: Any) -> None:
        raise RuntimeError("the engine has died")

    async with serving() as gateway:
        session = await opened(gateway, fails)
        for path in (CHAT, "/metrics", f"/s/{session.token}{CHAT}", f"/s/{session.token}/metrics", f"/s/x{CHAT}"):
            reader, writer = await send(
                gateway, f"POST {path} HTTP/1.0", f"x-api-key: {session.token}", "content-length: 2", "", "hi", end=""
            )
            assert session.token.encode() not in await reader.read()
            writer.close()
        assert session.token not in caplog.text + str(session) + "".join(capfd.readouterr())
    tokens = {Session(Recording(None, None, 1, 1), upper).token for _ in range(1000)}  # type: ignore[arg-type]
    assert (len(tokens), {len(token) for token in tokens}) == (1000, {32}), "192 bits"


@pytest.mark.parametrize(
    "headers",
    [
        ("content-length: -1",),
        ("content-length: 5x",),
        (f"content-length: {'9' * 5000}",),
        ("content-length: 1", "content-length: 2"),
        ("transfer-encoding: gzip",),
    ],
)
async def test_lengths_that_are_none_are_refused(headers: tuple[str, ...]) -> None:
    async with serving() as gateway:
        session = await opened(gateway)
        token = f"authorization: Bearer {session.token}"
        reader, writer = await send(gateway, f"POST {CHAT} HTTP/1.1", "host: x", token, *headers)
        assert (await reader.readline()).split()[1] in (b"400", b"413", b"501")
        writer.close()
        assert session.recording.calls == []


async def test_a_head_without_end_is_cut_off() -> None:
    async with serving() as gateway:
        session = await opened(gateway)
        _, writer = await send(gateway, f"POST {CHAT} HTTP/1.1", "host: x", end="\r\n")

        async def flood() -> None:
            for i in range(100_000):
                writer.write(f"x-header-{i}: {'x' * 1000}\r\n".encode())
                await writer.drain()

        with pytest.raises(ConnectionError):
            await flood()
        assert not session.tasks
        await until(lambda: not gateway._connections())


async def test_a_head_that_does_not_come_is_not_waited_for() -> None:
    """Beside it, a connection that is in use stays open from request to request."""

    async def ask(reader: asyncio.StreamReader, writer: Any, token: str) -> None:
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: {token}\r\ncontent-length: 2\r\n\r\nhi".encode())
        while await reader.readline() != b"0\r\n":  # the last piece
            pass
        await reader.readline()

    async with serving() as gateway:
        session = await opened(gateway)
        silent = await send(gateway, end="")
        slow = await send(gateway, f"POST {CHAT} HTTP/1.1", end="\r\n")
        used = await send(gateway, end="")
        await ask(*used, session.token)
        await until(lambda: len(gateway._connections()) == 3)
        await gateway._sweep()
        await ask(*used, session.token)
        await gateway._sweep()
        await ask(*used, session.token)
        await until(lambda: len(gateway._connections()) == 1)
        for _, writer in (silent, slow):
            writer.close()
        await ask(*used, session.token)
        used[1].close()


async def test_so_many_requests_of_an_episode_have_their_bodies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REQUESTS", 2)
    async with serving() as gateway:
        session, other = await opened(gateway), await opened(gateway)
        head = (f"POST {CHAT} HTTP/1.1", "host: x", f"x-api-key: {session.token}", "content-length: 40", "", "half")
        slow = [await send(gateway, *head, end="") for _ in range(2)]
        await until(lambda: len(session.tasks) == 2)
        assert (await post(gateway, CHAT, session.token)).status_code == 429
        assert (await post(gateway, CHAT, other.token)).status_code == 200
        slow[0][1].close()
        await until(lambda: len(session.tasks) == 1)
        assert (await post(gateway, CHAT, session.token)).status_code == 200
        slow[1][1].close()


class Large(App):
    """Answers with more than any buffer holds, in so many pieces."""

    pieces = 1

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__(scope, receive, lambda message: self.large(message, send))

    async def large(self, message: Any, send: Any) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            return
        for i in range(self.pieces):
            await send({"type": "http.response.body", "body": b"x" * (32 << 20), "more_body": i + 1 < self.pieces})


@pytest.mark.parametrize("pieces", [1, 4], ids=["at once", "in pieces"])
async def test_an_answer_that_nobody_reads_ends_with_the_episode(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it holds no place in the engine, and in memory no more than the piece that is being sent."""
    monkeypatch.setattr(Large, "pieces", pieces)
    async with serving(Large) as gateway:
        session, other = await opened(gateway), await opened(gateway)
        head = (f"POST {CHAT} HTTP/1.1", "host: x", f"x-api-key: {session.token}", "content-length: 2", "", "hi")
        _, writer = await send(gateway, *head, end="")
        await until(lambda: session.recording.calls)
        await until(lambda: gateway._connections()[0].transport.get_write_buffer_size())
        assert gateway._connections()[0].transport.get_write_buffer_size() < 33 << 20
        assert len(session.tasks) == (pieces > 1)
        await gateway.close(other)
        assert gateway._connections(), "another's"
        await gateway.close(session)
        await until(lambda: not gateway._connections())
        assert not session.tasks
        writer.close()


async def test_a_connection_that_another_episode_uses_by_now_stays_open() -> None:
    async with serving() as gateway:
        may_answer, asked = asyncio.Event(), asyncio.Event()

        async def slow(prompt: Any, sampling: Any) -> Any:
            asked.set()
            await may_answer.wait()
            return await upper(prompt, sampling)

        one, two = await opened(gateway), await opened(gateway, slow)
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=1)) as client:
            await client.post(gateway.url + CHAT, content=b"hi", headers={"x-api-key": one.token})
            asking = asyncio.create_task(
                client.post(gateway.url + CHAT, content=b"hi", headers={"x-api-key": two.token})
            )
            await asked.wait()
            assert len(gateway._connections()) == 1
            await gateway.close(one)
            may_answer.set()
            assert (await asking).content == b"HI"


class Persistent(App):
    """Answers at once, and samples later: as vLLM's app does with background=true."""

    def __init__(self, sample: Any) -> None:
        super().__init__(sample)
        self.later = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.work = asyncio.create_task(self.go_on())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"queued"})

    async def go_on(self) -> None:
        await self.later.wait()
        await self.sample([65], 5, ())


async def test_what_an_app_goes_on_with_samples_nothing_once_the_episode_is_over() -> None:
    async with serving(Persistent) as gateway:
        session = await opened(gateway)
        assert (await post(gateway, CHAT, session.token)).content == b"queued"
        await gateway.close(session)
        gateway._app.later.set()
        with pytest.raises(RequestRefused):
            await gateway._app.work
        assert session.recording.calls == []


async def test_the_end_of_the_server_ends_what_is_under_way() -> None:
    async with serving() as gateway:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def for_ever(prompt: Any, sampling: Any) -> None:
            begun.set()
            try:
                await asyncio.sleep(1000)
            finally:
                ended.set()

        session = await opened(gateway, for_ever)
        asking = asyncio.create_task(post(gateway, CHAT, session.token))
        await begun.wait()
        await gateway.stop()
        assert ended.is_set()
        assert not session.tasks
        with pytest.raises(httpx.HTTPError):
            (await asking).raise_for_status()
        with pytest.raises(httpx.ConnectError):
            await post(gateway, CHAT, session.token)
