"""The endpoint's own part: tokens, routes, sizes, and what ends with a session. vLLM's app is in test_endpoint.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from grpo_dist.agents import gateway as module
from grpo_dist.agents.episode import Endpoint
from grpo_dist.agents.gateway import Gateway
from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import ConfigError
from tests.agents.gateways import CHAT, App, opened, post, serving
from tests.messages import refuses


async def test_each_session_has_its_own_calls_whichever_way_its_token_comes() -> None:
    async with serving() as gateway:
        one, two = await opened(gateway), await opened(gateway)
        assert gateway.url.startswith("http://127.0.0.1:")
        assert (await post(gateway, CHAT, one.token)).content == b"HI"
        assert (await post(gateway, "/v1/completions", body=b"key", **{"x-api-key": two.token})).content == b"KEY"
        assert (await post(gateway, f"/s/{two.token}{CHAT}", "EMPTY", body=b"path")).content == b"PATH"
        assert [bytes(call.prompt_ids) for call in one.recording.calls] == [b"hi"]
        assert [bytes(call.prompt_ids) for call in two.recording.calls] == [b"key", b"path"]


async def test_an_agents_name_stands_before_the_route() -> None:
    async with serving() as gateway:
        session = await opened(gateway)
        for agent in ("", "the searcher", "a/b"):
            base_url, token = Endpoint(f"{gateway.url}/v1", session.token).of_agent(agent)
            path = f"{base_url.removeprefix(gateway.url)}/chat/completions"
            assert (await post(gateway, path, token)).status_code == (404 if "/" in agent else 200)
        await post(gateway, f"/s/{session.token}/agent/critic{CHAT}")
        await post(gateway, CHAT, session.token)
        assert [call.agent_name for call in session.recording.calls] == ["", "the searcher", "critic", ""]
        assert (await post(gateway, f"/agent/critic{CHAT}", "guess")).status_code == 401
        answer = await post(gateway, f"/agent/solver:255{CHAT}", session.token)
        assert answer.status_code == 400
        assert b"254" in answer.content


@pytest.mark.parametrize("token", ["", "guess", "closed"])
async def test_without_the_token_of_an_open_session_there_is_nothing(token: str) -> None:
    async with serving() as gateway:
        session, closed = await opened(gateway), await opened(gateway)
        await gateway.close(closed)
        for path in (CHAT, "/metrics"):
            answer = await post(gateway, path, closed.token if token == "closed" else token)
            assert answer.status_code == 401
            assert "error" in json.loads(answer.content)
        assert not session.recording.calls


@pytest.mark.parametrize("path", ["/metrics", "/pause", "/v1/load_lora_adapter", "/tokenize", "/", f"{CHAT}/../pause"])
async def test_routes_that_are_not_listed_do_not_exist(path: str) -> None:
    async with serving() as gateway:
        session = await opened(gateway)
        assert (await post(gateway, path, session.token)).status_code == 404
        assert (await post(gateway, f"/s/{session.token}{path}")).status_code == 404


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "in chunks"])
async def test_a_body_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch, declared: bool) -> None:
    monkeypatch.setattr(module, "MAX_BODY", 1000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * 100

    async with serving() as gateway:
        session = await opened(gateway)
        if declared:
            assert (await post(gateway, CHAT, session.token, b"x" * 1001)).status_code == 413
        else:
            with pytest.raises(httpx.HTTPError):
                (await post(gateway, CHAT, session.token, chunks())).raise_for_status()
        assert not session.recording.calls
        assert (await post(gateway, CHAT, session.token, b"x" * 60)).status_code == 200


async def test_what_is_refused_is_a_400_with_the_reason() -> None:
    async with serving() as gateway:
        session = await opened(gateway, max_calls=1)
        assert (await post(gateway, CHAT, session.token)).status_code == 200
        refused = await post(gateway, CHAT, session.token)
        assert refused.status_code == 400
        assert b"max_assistant_turns" in refused.content


async def test_closing_a_session_ends_what_it_samples_and_nothing_else() -> None:
    async with serving() as gateway:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def for_ever(prompt: list[int], sampling: SamplingSettings) -> Response | None:
            begun.set()
            try:
                await asyncio.sleep(1000)
            finally:
                ended.set()
            return None

        slow, other = await opened(gateway, for_ever), await opened(gateway)
        asking = asyncio.create_task(post(gateway, CHAT, slow.token))
        await begun.wait()
        await gateway.close(slow)
        assert ended.is_set()
        with pytest.raises(httpx.HTTPError):
            (await asking).raise_for_status()
        assert slow.recording.calls == []
        assert (await post(gateway, CHAT, other.token)).content == b"HI"


async def test_a_client_that_never_reads_holds_up_nobody() -> None:
    async with serving() as gateway:
        session, other = await opened(gateway), await opened(gateway)
        _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session.token}\r\ncontent-length: 40\r\n\r\n"
        writer.write(head.encode() + b"half of it")
        await writer.drain()
        assert (await post(gateway, CHAT, other.token)).content == b"HI"
        while not session.tasks:
            await asyncio.sleep(0.01)
        await gateway.close(session)
        writer.close()


async def test_an_app_that_cannot_be_made_is_told_to_each_who_asks_and_the_end_is_quiet() -> None:
    async def make_app(sample: Any) -> App:
        raise ConfigError("endpoint_kwargs.parser: there is none")

    gateway = Gateway(make_app)
    for _ in range(2):
        with refuses(ConfigError, "endpoint_kwargs.parser"):
            await opened(gateway)
    await gateway.stop()
    await Gateway(make_app).stop()
