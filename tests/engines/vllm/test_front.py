"""What a request is filled with on its way to vLLM's app, and who is let in."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.vllm.front import FORMS, Front, FrontSettings

SAMPLING = {"temperature": 0.0, "top_p": 0.9, "top_k": -1, "max_tokens": 7, "stop": ["###"]}
USAGE = Usage(3, "Be brief.", {}, SAMPLING)
SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello"}
SAMPLED = {"temperature": 0.0, "top_p": 0.9, "top_k": -1}


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
    ("path", "said", "filled"),
    [
        (
            "/v1/chat/completions",
            {"messages": [HELLO]},
            {"messages": [SYSTEM, HELLO], "max_tokens": 7, "stop": ["###"], **SAMPLED},
        ),
        (
            "/v1/responses",
            {"input": "Hello"},
            {"input": "Hello", "instructions": "Be brief.", "max_output_tokens": 7, "stop": ["###"], **SAMPLED},
        ),
        (
            "/v1/messages",
            {"messages": [HELLO], "max_tokens": 50},
            {"messages": [HELLO], "system": "Be brief.", "max_tokens": 50, "stop_sequences": ["###"], **SAMPLED},
        ),
        ("/v1/completions", {"prompt": "Hello"}, {"prompt": "Hello", "max_tokens": 7, "stop": ["###"], **SAMPLED}),
    ],
)
def test_a_request_that_says_nothing_is_asked_as_the_run_asked(path: str, said: Any, filled: Any) -> None:
    assert ask(path, said) == (200, filled)


def test_what_a_request_says_is_kept() -> None:
    own = {"temperature": 0.7, "top_p": 1.0, "top_k": 5, "max_completion_tokens": 50, "stop": [], "n": 3}
    said = {"messages": [{"role": "developer", "content": "Rhyme."}, HELLO], **own}
    assert ask("/v1/chat/completions", said) == (200, said)
    said = {"input": [HELLO], "instructions": "Rhyme.", "max_output_tokens": 9}
    assert ask("/v1/responses", said)[1] == said | SAMPLED | {"stop": ["###"]}
    said = {"messages": [{"role": "system", "content": "Rhyme."}, HELLO], "max_tokens": 9}
    assert ask("/v1/messages", said)[1] == said | SAMPLED | {"stop_sequences": ["###"]}


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
        filled = ask("/v1/chat/completions", said, usage=usage)[1]
        assert filled.get("continue_final_message", False) is goes_on
        assert filled.get("add_generation_prompt", True) is (not goes_on)
    assert ask("/v1/messages", said, usage=Usage())[1] == said, "which has no such keys"


def test_null_says_nothing() -> None:
    filled = ask("/v1/chat/completions", {"messages": [HELLO], "temperature": None, "stop": None, "max_tokens": None})[
        1
    ]
    assert (filled["temperature"], filled["stop"], filled["max_tokens"]) == (0.0, ["###"], 7)
    filled = ask("/v1/responses", {"input": [HELLO], "instructions": None})[1]
    assert filled["instructions"] == "Be brief."


@pytest.mark.parametrize("path", FORMS)
def test_a_model_of_no_run_adds_nothing(path: str) -> None:
    said = {"messages": [HELLO], "input": "Hello"}
    assert ask(path, said, usage=Usage()) == (200, said)


def test_no_stop_texts_are_no_texts() -> None:
    filled = ask("/v1/completions", {"prompt": "a"}, usage=Usage(sampling={"stop": []}))[1]
    assert filled == {"prompt": "a"}


@pytest.mark.parametrize("body", [b"", b"{", b"[1, 2]", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_left_to_the_app(body: bytes) -> None:
    assert ask("/v1/chat/completions", body) == (200, body)


async def test_a_body_that_is_cut_off_is_refused() -> None:
    sent: list[Any] = []

    async def cut() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    app = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(front=FrontSettings())))
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "app": app}
    await Front(None)(scope, cut, send)
    assert sent[0]["status"] == 413


def test_other_routes_are_left_alone() -> None:
    assert ask("/tokenize", {"messages": [HELLO]}) == (200, {"messages": [HELLO]})


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/invocations", "/metrics", "/v1/models", "/healthy", "//health"]
)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic secret"}, 401),
        ({"x-api-key": "wrong", "Authorization": "Bearer "}, 401),
        ({"Authorization": "bearer secret"}, 200),
        ({"x-api-key": "secret"}, 200),
    ],
)
def test_every_route_wants_the_token(path: str, headers: dict[str, str], status: int) -> None:
    found, body = ask(path, {}, usage=Usage(), token="secret", headers=headers)
    assert found == status
    assert ("error" in body) == (status == 401)


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
