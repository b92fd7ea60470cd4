"""vLLM's own OpenAI-compatible app, with our sampling behind it: its chat template, tool parsers, streams and errors.

The app sees an engine client that samples nothing itself: what is asked for goes to an `AppSample`, and what comes back
is answered in vLLM's form. So every route is recorded alike, whichever engine samples.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

from grpo_dist.engines.base import AppSample, RequestRefused, Response
from grpo_dist.errors import ConfigError

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

    Raises:
        ConfigError: vLLM's server has no such option.
    """
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from grpo_dist.engines.vllm.front import FrontSettings, put_front

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
    """What vLLM's app needs of an engine client."""

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
        """Sample, and answer in vLLM's form.

        Raises:
            RequestRefused: the request asks for what would change the samples.
        """
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
        head, found, _ = text.rpartition(response.stop)
        text = (head + found if params.include_stop_str_in_output else head) if found else text
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
