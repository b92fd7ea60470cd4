"""What stands before the routes of vLLM's server: who may ask, and what the run says where a request says nothing.

vLLM has no default for stop texts or the system prompt, its default for the length is a limit that a client cannot
raise, and its own token guards `/v1` alone, for clients that send it as bearer token.
"""

from __future__ import annotations

import hmac
import json
from argparse import Namespace
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from grpo_dist.assets.model_folder import Usage
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
    """The settings of the front: how the run asks, and the token; "": all of this machine may ask, None: all may."""

    usage: Usage = field(default_factory=Usage)
    token: str | None = ""


class Front:
    """The ASGI middleware. vLLM gives it nothing but the app, whose arguments have the settings as `front`."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket"):
            settings: FrontSettings = scope["app"].state.args.front
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if settings.token == "" and not is_this_machine(host):
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


def may_ask(headers: list[tuple[bytes, bytes]], token: str | None) -> bool:
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
