"""vLLM's own OpenAI-compatible server: its app with our sampling behind it, its arguments, its parsers of calls.

The app has vLLM's chat template, tool parsers, streams and errors. It sees an engine client that samples nothing
itself: what is asked for goes to an `AppSample`, and what comes back is answered in vLLM's form. So every route is
recorded alike, whichever engine samples. front.py stands before its routes.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.parser_manager import ParserManager
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.utils.argparse_utils import FlexibleArgumentParser

from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.base import AppSample, ParseCalls, RequestRefused, Response, ToolCall
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.arguments import engine_args
from grpo_dist.engines.vllm.front import MODEL, REQUEST, FrontSettings, put_front
from grpo_dist.errors import ConfigError

CONTENT_FORMAT = "string"  # templates see the text of a message, as in training, also where they would take its parts
OPTIONS_KEY = "actor_rollout_ref.rollout.agent.endpoint_kwargs"
# Of a request's sampling parameters those that would change what is sampled or how it is counted.
_UNTOUCHED = {
    "n": 1,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": (),
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "prompt_logprobs": None,
}
_FREE = (None, "auto", "none", "text")  # values that leave the policy to sample what it likes


async def openai_app(engine: Any, model_path: str, sample: AppSample, options: Mapping[str, Any]) -> Any:
    """Return the ASGI app over vLLM's LLMEngine or AsyncLLM, which has a tokenizer; `options` are of `vllm serve`."""
    named = ["--model", model_path, "--served-model-name", MODEL, "--generation-config", "vllm"]
    named += ["--chat-template-content-format", CONTENT_FORMAT]
    quiet = ["--disable-log-stats", "--disable-fastapi-docs", "--disable-uvicorn-access-log"]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([*named, *quiet])
    os.environ.pop("VLLM_API_KEY", None)  # of another server; here each episode has a key of its own
    for name, value in options.items():
        if not hasattr(arguments, name) or name in ("api_key", "tool_strict_level"):
            raise ConfigError(f"{OPTIONS_KEY}.{name}: vLLM's server has no such argument, or none that training heeds")
        setattr(arguments, name, value)
    put_front(arguments, FrontSettings(token=None))  # the gateway has asked for an episode's
    client = _Client(engine, sample)
    tasks: Any = await client.get_supported_tasks()
    app = build_app(arguments, tasks, client.model_config)
    await init_app_state(client, app.state, arguments, tasks)  # type: ignore[arg-type]
    # Stored, answers of all episodes would stay in memory, and those with background=true would outlive their episode.
    app.state.openai_serving_responses.enable_store = False  # whatever VLLM_ENABLE_RESPONSES_API_STORE says
    return app


class _Client:
    errored = False
    dead_error = RuntimeError("the engine has failed")

    def __init__(self, engine: Any, sample: AppSample) -> None:
        self.vllm_config, self.renderer = engine.vllm_config, engine.renderer
        self.model_config, self.input_processor = engine.vllm_config.model_config, engine.input_processor
        self._sample = sample

    def check_admission(self, n: int = 1) -> None:
        """Limits are the recording's."""

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def generate(self, prompt: Any, params: Any, request_id: str, **more: Any) -> AsyncIterator[Any]:
        if not isinstance(prompt, Mapping) or prompt.get("type") != "token":
            raise RequestRefused("text only: images and embeddings are not recorded")
        for name, usual in _UNTOUCHED.items():
            value = getattr(params, name, usual)
            if value and value != usual and list(value if isinstance(value, list) else [value]) != [usual]:
                raise RequestRefused(f"{name} changes what the policy would sample; leave it out")
        if params.structured_outputs is not None:  # which the parser of tools may have added
            if asked := _forms_asked_for(REQUEST.get({})):
                raise RequestRefused(f"{' and '.join(asked)} changes what the policy would sample; leave it out")
            _say_that_tools_are_free()
        if (params.logprobs or 0) > 1:
            raise RequestRefused("top_logprobs: only those of sampled tokens are recorded")
        ids = list(prompt["prompt_token_ids"])
        response = await self._sample(ids, params.max_tokens, params.stop or ())
        output = _output(response, params, self.renderer.get_tokenizer())
        yield RequestOutput(request_id, None, ids, None, [output], finished=True)


@cache  # once
def _say_that_tools_are_free() -> None:
    told = "the grammar of strict tools, parallel_tool_calls=false or endpoint_kwargs.tool_call_parser"
    sys.stdout.write(f"an agent's calls of tools are sampled freely in training: without {told}\n")  # is shown by a run


def _forms_asked_for(request: Mapping[str, Any]) -> list[str]:
    """What of a request has the engine sample in a given form, by its keys."""
    said = {key: request.get(key) for key in ("response_format", "structured_outputs", "tool_choice")}
    said |= {f"{key}.format": (request.get(key) or {}).get("format") for key in ("text", "output_config")}
    kinds = {key: value.get("type", "given") if isinstance(value, dict) else value for key, value in said.items()}
    return [f"{key}={kind}" for key, kind in kinds.items() if kind not in _FREE]


def _output(response: Response, params: Any, tokenizer: Any) -> CompletionOutput:
    is_ended = response.stop is None and not response.truncated  # by a token, which is no part of the text
    ids = response.token_ids[:-1] if is_ended else response.token_ids
    text = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
    if response.stop is not None:
        head, stop, _ = text.rpartition(response.stop)
        text = (head + stop if params.include_stop_str_in_output else head) if stop else text
    log_probs = None
    if params.logprobs is not None:
        pairs = zip(response.token_ids, response.log_probs, strict=True)
        log_probs = [{i: Logprob(value, rank=None, decoded_token=tokenizer.decode([i]))} for i, value in pairs]
    return CompletionOutput(
        0,
        text,
        response.token_ids,
        sum(response.log_probs),
        log_probs,
        finish_reason="length" if response.truncated else "stop",
        stop_reason=response.stop,
    )


# --- its arguments --------------------------------------------------------------------------------------------------
# What `vllm serve` would take from the command line, and is given in another way here.
GIVEN = ("model_tag", "host", "port", "uds", "api_key", "headless", "grpc", "api_server_count")


def server_arguments(
    settings: EngineSettings, usage: Usage, *, name: str, folder: str, token: str = "", more: Sequence[str] = ()
) -> Namespace:
    """The arguments of vLLM's server.

    Args:
        usage: what the run says where a request says nothing.
        folder: see `engine_args`.
        token: that requests must have; "": none.
        more: options of `vllm serve`, which win.
    """

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"behind --, for vLLM's server: {message}")

    parser = make_arg_parser(Parser())
    arguments = parser.parse_args(list(more), Namespace(**_usual(settings, usage, name, folder)))
    for name in GIVEN:
        if getattr(arguments, name) != parser.get_default(name):
            option = name.replace("_", "-")
            raise ConfigError(f"behind --: --{option}; model, --host, --port and --api-key stand before the --")
    try:
        validate_parsed_serve_args(arguments)
        if not (arguments.tool_parser_plugin or arguments.reasoning_parser_plugin):  # which bring more parsers
            validate_api_server_args(arguments)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"behind --, for vLLM's server: {error}") from None
    usual = usage.sampling.get("max_tokens")
    if usual is not None:  # vLLM would refuse longer ones, although the client has not asked for them
        usage = replace(usage, sampling=dict(usage.sampling) | {"max_tokens": min(usual, settings.max_model_len)})
    put_front(arguments, FrontSettings(usage, token))
    return arguments


def _usual(settings: EngineSettings, usage: Usage, name: str, folder: str) -> dict[str, Any]:
    # the model's own sampling defaults count where no run says how it is sampled
    usual: dict[str, Any] = {"disable_log_stats": False, "generation_config": "vllm" if usage.sampling else "auto"}
    usual["allowed_media_domains"] = ["none, unless --allowed-media-domains behind -- names it"]  # data: is none
    engine = engine_args(settings, folder=folder, usual=usual)
    return vars(engine) | {
        "served_model_name": [name],
        "chat_template_content_format": "openai" if settings.sees_images else CONTENT_FORMAT,
        "default_chat_template_kwargs": dict(usage.apply_chat_template_kwargs) or None,
        "uvicorn_log_level": "error",
        "disable_uvicorn_access_log": True,
        "disable_fastapi_docs": True,
    }


# --- its parsers ----------------------------------------------------------------------------------------------------
def vllm_parser(name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]], *, key: str) -> ParseCalls:
    """Return the function by which vLLM's server finds the calls of `tools`, JSON schemas, in a text.

    Raises:
        ConfigError: vLLM refuses the parser that `key` names.
    """
    for module in ("vllm.tool_parsers", "vllm.parser"):  # the policy is told of a call that they cannot read
        logging.getLogger(module).setLevel(logging.CRITICAL)
    cached: Any = get_cached_tokenizer(tokenizer)
    request: Any = ChatCompletionRequest.model_validate({"messages": [], "tools": list(tools)})
    try:
        parser = ParserManager.get_parser(name, enable_auto_tools=True, tokenizer=cached)
    except TypeError as error:
        raise ConfigError(f"{key}={name}: vLLM refuses it: {error}") from None
    assert parser is not None, "it is given a name"

    def parse(text: str) -> list[ToolCall]:
        made = parser(cached, request.tools)  # parsers remember what they have read
        _, _, calls = made.parse(text, request, enable_auto_tools=True)
        return [ToolCall(call.name, call.arguments) for call in calls or ()]

    return parse
