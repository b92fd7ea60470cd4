"""vLLM's own OpenAI-compatible app, with our sampling behind it, and what stands before its routes.

The app has vLLM's chat template, tool parsers, streams and errors. It sees an engine client that samples nothing
itself: what is asked for goes to an `AppSample`, and what comes back is answered in vLLM's form. So every route is
recorded alike, whichever engine samples.

The front says who may ask, and what the run says where a request says nothing: vLLM has no default for stop texts or
the system prompt, its default for the length is a limit that a client cannot raise, and its own token guards `/v1`
alone, for clients that send it as bearer token.
"""

from __future__ import annotations

import hmac
import json
import os
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.base import AppSample, RequestRefused, Response
from grpo_dist.errors import ConfigError
from grpo_dist.hosts import is_this_machine

MODEL = "policy"  # the name under which it is served
CONTENT_FORMAT = "string"  # templates see the text of a message, as in training, also where they would take its parts
OPTIONS_KEY = "actor_rollout_ref.rollout.agent.endpoint_kwargs"
# Of a request's sampling parameters those that would change what is sampled or how it is counted.
_UNTOUCHED = {
    "n": 1,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": (),
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "prompt_logprobs": None,
}


async def openai_app(engine: Any, model_path: str, sample: AppSample, options: Mapping[str, Any]) -> Any:
    """The ASGI app.

    Args:
        engine: vLLM's LLMEngine or AsyncLLM, with a tokenizer.
        model_path: the model's folder.
        sample: what samples.
        options: of `vllm serve`, such as `tool_call_parser`.
    """
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    named = ["--model", model_path, "--served-model-name", MODEL, "--generation-config", "vllm"]
    named += ["--chat-template-content-format", CONTENT_FORMAT]
    quiet = ["--disable-log-stats", "--disable-fastapi-docs", "--disable-uvicorn-access-log"]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([*named, *quiet])
    os.environ.pop("VLLM_API_KEY", None)  # of another server; here each episode has a key of its own
    for name, value in options.items():
        if not hasattr(arguments, name) or name == "api_key":
            raise ConfigError(f"{OPTIONS_KEY}.{name}: vLLM's server has no such argument")
        setattr(arguments, name, value)
    put_front(arguments, FrontSettings())
    client = _Client(engine, sample)
    tasks: Any = await client.get_supported_tasks()
    app = build_app(arguments, tasks, client.model_config)
    await init_app_state(client, app.state, arguments, tasks)  # type: ignore[arg-type]
    # Stored, answers of all episodes would stay in memory, and those with background=true would outlive their episode.
    app.state.openai_serving_responses.enable_store = False  # whatever VLLM_ENABLE_RESPONSES_API_STORE says
    return app


class _Client:
    """The engine client that vLLM's app needs."""

    errored = False
    dead_error = RuntimeError("the engine has failed")

    def __init__(self, engine: Any, sample: AppSample) -> None:
        self.vllm_config, self.renderer = engine.vllm_config, engine.renderer
        self.model_config, self.input_processor = engine.vllm_config.model_config, engine.input_processor
        self._sample = sample

    def check_admission(self, n: int = 1) -> None:
        """Limits are the recording's."""

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Nothing but generation."""
        return ("generate",)

    async def generate(self, prompt: Any, params: Any, request_id: str, **more: Any) -> AsyncIterator[Any]:
        """Sample, and answer in vLLM's form."""
        from vllm.outputs import RequestOutput

        if not isinstance(prompt, Mapping) or prompt.get("type") != "token":
            raise RequestRefused("text only: images and embeddings are not recorded")
        for name, usual in _UNTOUCHED.items():
            value = getattr(params, name, usual)
            if value and value != usual and list(value if isinstance(value, list) else [value]) != [usual]:
                asked = (
                    "response_format, or a tool_choice that forces a tool,"
                    if name == "structured_outputs"
                    else f"{name}"
                )
                raise RequestRefused(f"{asked} changes what the policy would sample; leave it out")
        if (params.logprobs or 0) > 1:
            raise RequestRefused("top_logprobs: only those of sampled tokens are recorded")
        ids = list(prompt["prompt_token_ids"])
        response = await self._sample(ids, params.max_tokens, params.stop or ())
        output = _output(response, params, self.renderer.get_tokenizer())
        yield RequestOutput(request_id, None, ids, None, [output], finished=True)


def _output(response: Response, params: Any, tokenizer: Any) -> Any:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput

    is_ended = response.stop is None and not response.truncated  # by a token, which is no part of the text
    ids = response.token_ids[:-1] if is_ended else response.token_ids
    text = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
    if response.stop is not None:
        head, stop, _ = text.rpartition(response.stop)
        text = (head + stop if params.include_stop_str_in_output else head) if stop else text
    log_probs = None
    if params.logprobs is not None:
        pairs = zip(response.token_ids, response.log_probs, strict=True)
        log_probs = [
            {token: Logprob(value, rank=None, decoded_token=tokenizer.decode([token]))} for token, value in pairs
        ]
    return CompletionOutput(
        0,
        text,
        response.token_ids,
        sum(response.log_probs),
        log_probs,
        finish_reason="length" if response.truncated else "stop",
        stop_reason=response.stop,
    )


OPEN_PATH = "/health"  # answers everybody
SYSTEM_ROLES = ("system", "developer")
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
        """Pass a request on."""
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
        body = json.dumps(as_the_run_asks(said, form, usage)).encode()
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Any:
        return messages.pop() if messages else await receive()

    return scope | {"headers": [*headers, (b"content-length", str(len(body)).encode())]}, read
