"""The endpoint's own part, also for a hostile program on this machine. vLLM's app: engines/vllm/test_openai_app.py."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from grpo_dist.agents import gateway as module
from grpo_dist.agents.episode import Endpoint
from grpo_dist.agents.gateway import Gateway, Session
from grpo_dist.agents.recording import Recording
from grpo_dist.engines.base import RequestRefused
from grpo_dist.engines.rendezvous import LOOPBACK
from grpo_dist.errors import ConfigError
from tests.agents.fakes import until
from tests.agents.gateways import CHAT, App, opened, post, serving, upper
from tests.messages import refuses

POST = f"POST {CHAT} HTTP/1.1"


async def send(gateway: Gateway, *lines: str, end: str = "\r\n\r\n") -> tuple[asyncio.StreamReader, Any]:
    """Lines as they are, on a connection of their own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(("\r\n".join(lines) + end).encode())
    return reader, writer


async def status(gateway: Gateway, path: str, token: str) -> int:
    """Of a request with this path as it is: clients would tidy it up."""
    headers = ("host: x", f"authorization: Bearer {token}", "content-length: 0", "connection: close")
    reader, writer = await send(gateway, f"POST {path} HTTP/1.1", *headers)
    answer = await reader.read()
    writer.close()
    return int(answer.split(maxsplit=2)[1])


class Slow:
    def __init__(self) -> None:
        self.begun, self.may, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, prompt: Any, sampling: Any) -> Any:
        self.begun.set()
        try:
            await self.may.wait()
        finally:
            self.ended.set()
        return await upper(prompt, sampling)


async def test_each_session_has_its_own_calls_whichever_way_its_token_comes() -> None:
    async with serving() as gateway:
        one, two = await opened(gateway), await opened(gateway)
        assert gateway.url.startswith("http://127.0.0.1:")
        assert (await post(gateway, CHAT, one.token)).content == b"HI"
        assert (await post(gateway, "/v1/completions", body=b"key", **{"x-api-key": two.token})).content == b"KEY"
        assert (await post(gateway, f"/s/{two.token}{CHAT}", "EMPTY", body=b"path")).content == b"PATH"
        assert (await post(gateway, f"/s/{two.token}{CHAT}", one.token, body=b"both")).content == b"BOTH"
        await gateway.close(two)
        for path, token in ((f"/s/{two.token}{CHAT}", one.token), *((CHAT, t) for t in ("", "guess", two.token))):
            answer = await post(gateway, path, token)
            assert answer.status_code == 401
            assert "error" in json.loads(answer.content)
        assert (await post(gateway, "/metrics", "guess")).status_code == 401
        assert [bytes(call.prompt_ids) for call in one.recording.calls] == [b"hi"]
        assert [bytes(call.prompt_ids) for call in two.recording.calls] == [b"key", b"path", b"both"]


async def test_an_agents_name_stands_before_the_route() -> None:
    async with serving() as gateway:
        session = await opened(gateway, max_calls=4)
        for agent in ("", "the searcher", "a/b"):
            base_url, token = Endpoint(f"{gateway.url}/v1", session.token).of_agent(agent)
            path = f"{base_url.removeprefix(gateway.url)}/chat/completions"
            assert (await post(gateway, path, token)).status_code == (404 if "/" in agent else 200)
        await post(gateway, f"/s/{session.token}/agent/critic{CHAT}")
        await post(gateway, CHAT, session.token)
        assert [call.agent_name for call in session.recording.calls] == ["", "the searcher", "critic", ""]
        assert (await post(gateway, f"/agent/critic{CHAT}", "guess")).status_code == 401
        for path, reason in ((f"/agent/solver:255{CHAT}", b"254"), (CHAT, b"max_assistant_turns")):
            refused = await post(gateway, path, session.token)
            assert (refused.status_code, reason in refused.content) == (400, True)


ODD = [
    *(f"/{CHAT}", f"/.{CHAT}", f"{CHAT}/", f"{CHAT}/../../../metrics", f"{CHAT}/../pause", f"{CHAT}%00"),
    *(f"{CHAT};/metrics", "/v1/../metrics", "/v1/%2e%2e/metrics", "/%2fmetrics", "/V1/CHAT/COMPLETIONS"),
    *("/v1/responses/resp_1", "/v1/load_lora_adapter", "/tokenize", "/metrics", "/pause", "/", "/s/", "/s//"),
    *("http://x/metrics", "*"),
]


async def test_other_paths_lead_nowhere() -> None:
    async with serving() as gateway:
        session, other = await opened(gateway), await opened(gateway)
        within = f"/s/{session.token}"
        for path in (*ODD, *(within + path for path in ODD), within, f"{within}/s/{other.token}{CHAT}"):
            assert await status(gateway, path, session.token) in (400, 401, 404), path
        assert await status(gateway, "/metrics", session.token) == 404
        assert gateway._app.paths == []
        assert await status(gateway, "/v1/%63hat/completions?x=/metrics", session.token) == 200
        assert gateway._app.paths == [CHAT], "it sees the path that was checked"


async def test_a_token_stays_a_secret(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.DEBUG)

    async def fails(prompt: Any, sampling: Any) -> None:
        raise RuntimeError("the engine has died")

    async with serving() as gateway:
        session = await opened(gateway, fails)
        headers = (f"x-api-key: {session.token}", "content-length: 2", "", "hi")
        for path in (CHAT, "/metrics", f"/s/{session.token}{CHAT}", f"/s/{session.token}/metrics", f"/s/x{CHAT}"):
            reader, writer = await send(gateway, f"POST {path} HTTP/1.0", *headers, end="")
            assert session.token.encode() not in await reader.read()
            writer.close()
        assert session.token not in caplog.text + str(session) + "".join(capfd.readouterr())
    tokens = {Session(Recording(None, None, 1, 1), upper).token for _ in range(1000)}
    assert (len(tokens), {len(token) for token in tokens}) == (1000, {32}), "192 bits"


LENGTHS = [
    *(("content-length: -1",), ("content-length: 5x",), (f"content-length: {'9' * 5000}",)),
    *(("content-length: 1", "content-length: 2"), ("transfer-encoding: gzip",)),
]


async def test_a_body_that_is_too_large_or_of_no_length_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BODY", 1000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * 100

    async with serving() as gateway:
        session = await opened(gateway)
        for headers in LENGTHS:
            reader, writer = await send(gateway, POST, "host: x", f"x-api-key: {session.token}", *headers)
            assert (await reader.readline()).split()[1] in (b"400", b"413", b"501"), headers
            writer.close()
        with pytest.raises(httpx.TransportError):  # and no answer of the app, which had read it
            await post(gateway, CHAT, session.token, chunks())
        assert (await post(gateway, CHAT, session.token, b"x" * 1001)).status_code == 413
        assert not session.recording.calls
        assert (await post(gateway, CHAT, session.token, b"x" * 60)).status_code == 200


async def test_a_head_without_end_is_cut_off_and_one_that_does_not_come_is_not_waited_for() -> None:
    async with serving() as gateway:
        session = await opened(gateway)
        _, writer = await send(gateway, POST, "host: x", end="\r\n")

        async def flood() -> None:
            for i in range(100_000):
                writer.write(f"x-header-{i}: {'x' * 1000}\r\n".encode())
                await writer.drain()

        with pytest.raises(ConnectionError):
            await flood()
        assert not session.tasks
        await until(lambda: not gateway._connections())

    # Beside it, a connection that is in use stays open from request to request.
    async def ask(reader: asyncio.StreamReader, writer: Any, token: str) -> None:
        writer.write(f"{POST}\r\nhost: x\r\nx-api-key: {token}\r\ncontent-length: 2\r\n\r\nhi".encode())
        while await reader.readline() != b"0\r\n":  # the last piece
            pass
        await reader.readline()

    async with serving() as gateway:
        session = await opened(gateway)
        silent, slow = await send(gateway, end=""), await send(gateway, POST, end="\r\n")
        used = await send(gateway, end="")
        await ask(*used, session.token)
        await until(lambda: len(gateway._connections()) == 3)
        for _ in range(2):
            await gateway._sweep()
            await ask(*used, session.token)
        await until(lambda: len(gateway._connections()) == 1)
        await ask(*used, session.token)
        for _, writer in (silent, slow, used):
            writer.close()


async def test_so_many_requests_of_an_episode_have_their_bodies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold up no other episode, and end with their own."""
    monkeypatch.setattr(module, "MOST_REQUESTS", 2)
    async with serving() as gateway:
        session, other = await opened(gateway), await opened(gateway)
        head = (POST, "host: x", f"x-api-key: {session.token}", "content-length: 40", "", "half")
        slow = [await send(gateway, *head, end="") for _ in range(2)]
        await until(lambda: len(session.tasks) == 2)
        assert (await post(gateway, CHAT, session.token)).status_code == 429
        assert (await post(gateway, CHAT, other.token)).content == b"HI"
        slow[0][1].close()
        await until(lambda: len(session.tasks) == 1)
        assert (await post(gateway, CHAT, session.token)).status_code == 200
        await gateway.close(session)
        assert not session.tasks
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
        head = (POST, "host: x", f"x-api-key: {session.token}", "content-length: 2", "", "hi")
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
        slow = Slow()
        one, two = await opened(gateway), await opened(gateway, slow)
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=1), timeout=60) as client:

            async def ask(session: Session) -> httpx.Response:
                return await client.post(gateway.url + CHAT, content=b"hi", headers={"x-api-key": session.token})

            await ask(one)
            asking = asyncio.create_task(ask(two))
            await slow.begun.wait()
            assert len(gateway._connections()) == 1
            await gateway.close(one)
            slow.may.set()
            assert (await asking).content == b"HI"


class Persistent(App):
    """Answers at once, and samples later: as vLLM's app does with background=true."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.later = asyncio.Event()
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


@pytest.mark.parametrize("whole", [False, True], ids=["session", "server"])
async def test_what_is_under_way_ends_with_its_session_and_with_the_server(whole: bool) -> None:
    async with serving() as gateway:
        slow = Slow()
        session, other = await opened(gateway, slow), await opened(gateway)
        asking = asyncio.create_task(post(gateway, CHAT, session.token))
        await slow.begun.wait()
        await (gateway.stop() if whole else gateway.close(session))
        assert slow.ended.is_set()
        assert (session.tasks, session.recording.calls) == (set(), [])
        with pytest.raises(httpx.HTTPError):
            (await asking).raise_for_status()
        if whole:
            with pytest.raises(httpx.ConnectError):
                await post(gateway, CHAT, other.token)
        else:
            assert (await post(gateway, CHAT, other.token)).content == b"HI"


async def test_an_app_that_cannot_be_made_is_told_to_each_who_asks_and_the_end_is_quiet() -> None:
    async def make_app(sample: Any) -> App:
        raise ConfigError("endpoint_kwargs.parser: there is none")

    gateway, unasked = (Gateway(make_app, module.socket_at(LOOPBACK, LOOPBACK), None) for _ in range(2))
    for _ in range(2):
        with refuses(ConfigError, "endpoint_kwargs.parser"):
            await opened(gateway)
    for each in (gateway, unasked):
        await each.stop()
    assert unasked._bound.fileno() == -1


async def test_where_it_listens_and_what_agents_are_told() -> None:
    for host, node_ip, advertised_host, url in (
        (LOOPBACK, "10.0.0.5", None, "http://127.0.0.1:"),
        ("127.0.0.2", "10.0.0.5", None, "http://127.0.0.2:"),
        ("auto", "127.0.0.3", None, "http://127.0.0.3:"),
        ("0.0.0.0", "10.0.0.5", "host.docker.internal", "http://host.docker.internal:"),
        (LOOPBACK, "10.0.0.5", "fd00::5", "http://[fd00::5]:"),
    ):
        bound = module.socket_at(host, node_ip)
        gateway, (address, port) = Gateway(None, bound, advertised_host), bound.getsockname()  # type: ignore[arg-type]
        assert gateway.url == f"{url}{port}"
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(address, port)
        await gateway.stop()


async def test_the_own_address_in_a_local_cluster_is_that_of_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "own_ip", lambda host, port: {"192.0.2.1": "127.0.0.4"}[host])
    assert module.socket_at("auto", LOOPBACK).getsockname()[0] == "127.0.0.4"


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7", "auto"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with refuses(ConfigError, f"rollout.agent.endpoint_host={host}", socket.gethostname(), "auto"):
        module.socket_at(host, "203.0.113.8")
