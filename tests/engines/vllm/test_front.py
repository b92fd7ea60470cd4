"""Before vLLM's app: where it listens, who is let in, what fills a request, and its time; tests/cli/test_serve.py."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from grpo_dist import hosts
from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.vllm.front import FORMS, Front, FrontSettings
from grpo_dist.engines.vllm.server import TimedProtocol, listen
from grpo_dist.errors import ConfigError
from tests.messages import refuses

SAMPLED = {"temperature": 0.0, "top_p": 0.9, "top_k": -1}
USAGE = Usage(3, "Be brief.", {}, {**SAMPLED, "max_tokens": 7, "stop": ["###"]})
SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello"}
CHAT, RESPONSES, ANTHROPIC, TEXT = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
OWN = {"temperature": 0.7, "top_p": 1.0, "top_k": 5, "max_completion_tokens": 50, "stop": [], "n": 3}
NOTHING = {"temperature": None, "stop": None, "max_tokens": None}


def ask(path: str, body: Any, *, usage: Usage = USAGE, token: str = "", headers: Any = None, **more: Any) -> Any:
    """The status, and the body as the app behind the front has it."""

    async def echo(request: Request) -> Response:
        received = await request.body()
        assert int(request.headers["content-length"]) == len(received)
        return Response(received, media_type="application/json")

    async def call() -> httpx.Response:
        app = Starlette(routes=[Route("/{path:path}", echo, methods=["POST", "GET", "OPTIONS"])])
        app.add_middleware(Front)
        app.state.args = SimpleNamespace(front=FrontSettings(usage, token))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            return await client.request(more.get("method", "POST"), path, headers=headers, **content)

    answer = asyncio.run(call())
    return answer.status_code, answer.json() if answer.content and not isinstance(body, bytes) else answer.content


@pytest.mark.parametrize(
    ("path", "said", "added"),
    [
        (CHAT, {"messages": [HELLO]}, {"messages": [SYSTEM, HELLO], "max_tokens": 7, "stop": ["###"]}),
        (RESPONSES, {"input": "Hello"}, {"instructions": "Be brief.", "max_output_tokens": 7, "stop": ["###"]}),
        (ANTHROPIC, {"messages": [HELLO], "max_tokens": 50}, {"system": "Be brief.", "stop_sequences": ["###"]}),
        (TEXT, {"prompt": "Hello"}, {"max_tokens": 7, "stop": ["###"]}),
        # null says nothing
        (CHAT, {"messages": [SYSTEM, HELLO], **NOTHING}, {"max_tokens": 7, "stop": ["###"]}),
        (
            RESPONSES,
            {"input": [HELLO], "instructions": None},
            {"instructions": "Be brief.", "max_output_tokens": 7, "stop": ["###"]},
        ),
        # what a request says is kept
        (CHAT, {"messages": [{"role": "developer", "content": "Rhyme."}, HELLO], **OWN}, OWN),
        (RESPONSES, {"input": [HELLO], "instructions": "Rhyme.", "max_output_tokens": 9}, {"stop": ["###"]}),
        (
            ANTHROPIC,
            {"messages": [{"role": "system", "content": "Rhyme."}, HELLO], "max_tokens": 9},
            {"stop_sequences": ["###"]},
        ),
        ("/tokenize", {"messages": [HELLO], **OWN}, OWN),  # of another route all is left alone
    ],
)
def test_where_a_request_says_nothing_it_is_asked_as_the_run_asked(path: str, said: Any, added: Any) -> None:
    assert ask(path, said) == (200, said | SAMPLED | added)


@pytest.mark.parametrize(
    ("last", "more", "goes_on"),
    [
        ({"role": "assistant", "content": "Let me see:"}, {}, True),
        ({"role": "assistant", "content": [{"type": "text", "text": "Let me see:"}]}, {}, True),
        ({"role": "assistant", "content": "Let me see:"}, {"add_generation_prompt": True}, False),
        ({"role": "assistant", "content": "Let me see:"}, {"continue_final_message": False}, False),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, {}, False),
        ({"role": "assistant", "content": "Let me see:", "tool_calls": [{}]}, {}, False),
        (HELLO, {}, False),
    ],
)
def test_the_policy_goes_on_from_a_begun_turn(last: Any, more: Any, goes_on: bool) -> None:
    said = {"messages": [HELLO, last], **more}
    for usage in (Usage(), USAGE):
        filled = ask(CHAT, said, usage=usage)[1]
        assert filled.get("continue_final_message", False) is goes_on
        assert filled.get("add_generation_prompt", True) is (not goes_on)
    assert ask(ANTHROPIC, said, usage=Usage())[1] == said, "which has no such keys"


def test_a_model_of_no_run_adds_nothing() -> None:
    for path in FORMS:
        said = {"messages": [HELLO], "input": "Hello"}
        assert ask(path, said, usage=Usage()) == (200, said)
    assert ask(TEXT, {"prompt": "a"}, usage=Usage(sampling={"stop": []}))[1] == {"prompt": "a"}, "no texts stop it"


@pytest.mark.parametrize("body", [b"", b"{", b"[1, 2]", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_left_to_the_app(body: bytes) -> None:
    assert ask(CHAT, body) == (200, body)


async def test_a_body_that_is_cut_off_is_refused() -> None:
    sent: list[Any] = []

    async def cut() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    app = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(front=FrontSettings())))
    scope = {"type": "http", "method": "POST", "path": TEXT, "headers": [], "app": app}
    await Front(None)(scope, cut, send)
    assert sent[0]["status"] == 413


@pytest.mark.parametrize("path", [CHAT, "/invocations", "/metrics", "/v1/models", "/healthy", "//health"])
def test_every_route_wants_the_token(path: str) -> None:
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic secret"}, 401),
        ({"x-api-key": "wrong", "Authorization": "Bearer "}, 401),
        ({"Authorization": "bearer secret"}, 200),
        ({"x-api-key": "secret"}, 200),
    ):
        found, body = ask(path, {}, usage=Usage(), token="secret", headers=headers)
        assert (found, "error" in body) == (status, status == 401), headers


def test_health_answers_everybody_and_so_does_a_server_without_a_token() -> None:
    assert ask("/health", {}, token="secret")[0] == 200
    assert ask("/v1/models", {}, token="secret", method="OPTIONS")[0] == 200
    assert ask("/v1/models", {})[0] == 200


def test_without_a_token_the_name_must_be_this_machine() -> None:
    """What a web page sends that has turned its name to the loopback address."""
    evil = {"Host": "evil.example:8000"}
    for path in ("/v1/models", "/health", "/tokenize"):
        status, answer = ask(path, {}, headers=evil)
        assert (status, answer["error"]["code"]) == (403, 403)
        assert "evil.example" in answer["error"]["message"]
        assert ask(path, {}, headers={"Host": "127.0.0.1:8000"})[0] == 200
        assert ask(path, {}, token="t", headers=evil | {"x-api-key": "t"})[0] == 200


# --- the server ------------------------------------------------------------------------------------------------------
def test_a_port_that_is_taken_and_an_address_of_another_machine_are_refused() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert port > 0
        with refuses(ConfigError, "--host 127.0.0.1", f"--port {port}", 0):
            listen("127.0.0.1", port)
    with listen("127.0.0.1", port) as again:
        assert again.family is socket.AF_INET
    with refuses(ConfigError, "--host 192.0.2.1", "--port 0"):  # for documentation, RFC 5737
        listen("192.0.2.1", 0)


GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "sent"),
    [(0, b""), (0, GET[:21]), (0, b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc"), (2, GET[:9])],
    ids=["nothing", "headers", "body", "behind others"],
)
async def test_a_request_that_does_not_come(before: int, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may take longer, and the next request has a time of its own."""
    monkeypatch.setattr(hosts, "REQUEST_S", 0.2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(0.5)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    server = uvicorn.Server(uvicorn.Config(app, port=0, http=TimedProtocol, lifespan="off", log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
    for _ in range(before):
        writer.write(GET)
        assert (await asyncio.wait_for(reader.readuntil(b"ok"), 30)).startswith(b"HTTP/1.1 200")
    writer.write(sent)
    assert b"200" not in await asyncio.wait_for(reader.read(), 30)  # until it is closed
    writer.close()
    server.should_exit = True
    await serving
