"""What vLLM's server is started with, and its parsers of tool calls. tests/cli/test_serve.py starts one."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from dataclasses import replace
from typing import Any

import httpx
import pytest

from grpo_dist.agents.gateway import ROUTES
from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.base import Response, ToolCall
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm import openai_app
from grpo_dist.engines.vllm.openai_app import server_arguments, vllm_parser
from grpo_dist.engines.vllm.starting import quiet_environment
from grpo_dist.errors import ConfigError
from tests.agents.gateways import opened, serving
from tests.agents.speaking import MESSAGES, call, tokenizer_of
from tests.engines.vllm.speaking_engine import OPTIONS, SpeakingEngine
from tests.messages import refuses, says
from tests.worker_settings import changed, engine_settings

MODEL = resolve_model_path("builtin:tiny-qwen3")
SETTINGS = engine_settings(MODEL, max_num_batched_tokens=1024, seed=3, needs_tokenizer=True)
RUN = Usage(3, "Be brief.", {"enable_thinking": False}, {"temperature": 0.0, "max_tokens": 200, "stop": ["###"]})


def arguments(*more: str, usage: Usage = RUN, settings: EngineSettings = SETTINGS) -> Any:
    quiet_environment("cpu")
    with tempfile.TemporaryDirectory() as folder:
        return server_arguments(settings, usage, name="policy", folder=folder, token="secret", more=more)


def test_the_engine_is_a_runs_and_the_server_vllms() -> None:
    found = arguments()
    assert (found.model, found.dtype, found.max_model_len, found.seed) == (MODEL, "float32", 96, 3)
    assert (found.kv_cache_memory_bytes, found.max_num_seqs) == (0.0625 * 2**30, 64)
    assert found.served_model_name == ["policy"]
    assert found.default_chat_template_kwargs == {"enable_thinking": False}
    assert found.chat_template_content_format == "string", "what templates see in training"
    seeing = arguments(settings=replace(SETTINGS, sees_images=True))
    assert seeing.chat_template_content_format == "openai", "with images they see a message's parts"
    assert found.middleware == ["grpo_dist.engines.vllm.front.Front"]
    assert (found.front.token, found.api_key) == ("secret", None)
    assert not found.disable_log_stats, "/metrics has nothing without them"
    assert [" " in name for name in found.allowed_media_domains] == [True], "no machine, from which images are fetched"


def test_what_the_run_says_counts_and_where_there_is_none_the_models_own_sampling() -> None:
    """A response's usual length is one that fits."""
    found, longer = arguments(), arguments(settings=replace(SETTINGS, max_model_len=400))
    assert found.front.usage.sampling == {"temperature": 0.0, "max_tokens": 96, "stop": ["###"]}
    assert longer.front.usage.sampling["max_tokens"] == 200
    none = arguments(usage=Usage())
    assert (found.generation_config, none.generation_config) == ("vllm", "auto")
    assert none.default_chat_template_kwargs is None


def test_options_of_vllm_win() -> None:
    more = ["--max-num-seqs", "5", "--enable-auto-tool-choice", "--tool-call-parser=hermes", "--middleware", "a.B"]
    found = arguments(*more, "--default-chat-template-kwargs", '{"x": 1}', "--allowed-media-domains", "x.org")
    assert found.allowed_media_domains == ["x.org"]
    assert (found.max_num_seqs, found.tool_call_parser, found.enable_auto_tool_choice) == (5, "hermes", True)
    assert found.middleware == ["a.B", "grpo_dist.engines.vllm.front.Front"]
    assert found.default_chat_template_kwargs == {"x": 1}
    own = changed(SETTINGS, vllm={"max_num_seqs": 6, "disable_log_stats": True})
    assert (arguments(settings=own).max_num_seqs, arguments(settings=own).disable_log_stats) == (6, True)
    assert arguments(*more, settings=own).max_num_seqs == 5


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--no-such-option"], ["--no-such-option"]),
        (["--max-num-seqs", "many"], ["--max-num-seqs", "many"]),
        (["--port", "9000"], ["--port"]),
        (["--host=0.0.0.0"], ["--host"]),
        (["--api-key", "other"], ["--api-key"]),
        (["another/model"], ["--model-tag"]),
        (["--uds", "/a/socket"], ["--uds"]),
        (["--enable-auto-tool-choice"], ["--enable-auto-tool-choice", "--tool-call-parser"]),
        (["--enable-auto-tool-choice", "--tool-call-parser", "no_such"], ["no_such"]),
    ],
)
def test_options_that_are_wrong_or_given_otherwise_are_refused(more: list[str], named: list[str]) -> None:
    with refuses(ConfigError, "--", *named):
        arguments(*more)


def test_an_engine_argument_that_vllm_does_not_have_is_refused() -> None:
    with refuses(ConfigError, "actor_rollout_ref.rollout.engine_kwargs.vllm", "no_such"):
        arguments(settings=changed(SETTINGS, vllm={"no_such": 1}))


# --- requests of agents in training ---------------------------------------------------------------------------------
INTEGER = {"type": "integer"}
ADD: dict[str, Any] = {"name": "add", "parameters": {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}}
CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
STRICT = {
    CHAT: {"messages": MESSAGES, "tools": [{"type": "function", "function": ADD | {"strict": True}}]},
    RESPONSES: {"input": "2+3?", "tools": [{"type": "function", "strict": True, **ADD}]},
    ANTHROPIC: {
        "messages": MESSAGES,
        "max_tokens": 300,
        "tools": [{"name": "add", "strict": True, "input_schema": ADD["parameters"]}],
    },
}
ONE_CALL = {"parallel_tool_calls": False}
JSON_FORM = {"type": "json_schema", "name": "sum", "schema": {"type": "object"}}


@pytest.fixture(scope="module")
def engine() -> SpeakingEngine:
    return SpeakingEngine()


async def asked(engine: SpeakingEngine, path: str, body: Any, parser: str = "hermes") -> tuple[httpx.Response, str]:
    """What an agent is answered where the policy calls `add` twice, and the prompt."""
    tokenizer, prompts = engine.renderer.get_tokenizer(), []

    async def sample(ids: list[int], most: int | None, stop: Any) -> Response:
        prompts.append(tokenizer.decode(ids))
        said = [*tokenizer.encode(call("add", '{"a": 2}') * 2, add_special_tokens=False), tokenizer.eos_token_id]
        return Response(said, [-0.5] * len(said), False, [3] * len(said))

    app = await openai_app.openai_app(engine, MODEL, sample, OPTIONS | {"tool_call_parser": parser})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.post(path, json={"model": "policy", **body})
    return answer, "".join(prompts)


@pytest.mark.parametrize(
    ("path", "more", "parser", "calls"),
    [
        (CHAT, {}, "hermes", 2),
        (CHAT, ONE_CALL, "hermes", 1),
        (CHAT, {"tool_choice": "auto", "response_format": {"type": "text"}}, "hermes", 2),
        (RESPONSES, {"text": {"format": {"type": "text"}}}, "hermes", 2),
        (RESPONSES, ONE_CALL, "hermes", 1),
        (ANTHROPIC, {}, "hermes", 2),
        (ANTHROPIC, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "hermes", 1),
        (CHAT, {"tools": [{"type": "function", "function": ADD}]}, "glm47", 0),  # whose grammar is always there
    ],
)
async def test_what_clients_write_by_themselves_is_not_refused(
    engine: SpeakingEngine, capsys: pytest.CaptureFixture[str], path: str, more: Any, parser: str, calls: int
) -> None:
    """And it is sampled as freely as all of a run is, which is said once."""
    openai_app._say_that_tools_are_free.cache_clear()
    for _ in range(2):
        answer, prompt = await asked(engine, path, STRICT[path] | more, parser)
        assert answer.status_code == 200, answer.text
    assert '"name": "add"' in prompt
    if calls:
        found = answer.json()
        made = {
            CHAT: lambda: found["choices"][0]["message"]["tool_calls"],
            RESPONSES: lambda: [part for part in found["output"] if part["type"] == "function_call"],
            ANTHROPIC: lambda: [part for part in found["content"] if part["type"] == "tool_use"],
        }[path]()
        assert len(made) == calls
    told = capsys.readouterr().out
    assert told.count("strict") == 1
    says(told, "strict", "parallel_tool_calls=false", "endpoint_kwargs.tool_call_parser")


@pytest.mark.parametrize(
    ("path", "more", "named"),
    [
        (CHAT, {"tool_choice": "required"}, ["tool_choice=required"]),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "add"}}}, ["tool_choice=function"]),
        (CHAT, {"response_format": {"type": "json_object"}}, ["response_format=json_object"]),
        (CHAT, {"structured_outputs": {"regex": "a+"}, **ONE_CALL}, ["structured_outputs"]),
        (RESPONSES, {"tool_choice": "required"}, ["tool_choice=required"]),
        (RESPONSES, {"text": {"format": JSON_FORM}}, ["text.format=json_schema"]),
        (ANTHROPIC, {"tool_choice": {"type": "any"}}, ["tool_choice=any"]),
        (ANTHROPIC, {"output_config": {"format": JSON_FORM}}, ["output_config.format=json_schema"]),
    ],
)
async def test_what_forces_a_form_is_refused_by_what_stands_in_the_request(
    engine: SpeakingEngine, path: str, more: Any, named: list[str]
) -> None:
    answer, prompt = await asked(engine, path, STRICT[path] | more)
    assert (answer.status_code, prompt) == (400, "")
    message = answer.json()["error"]["message"]
    says(message, *named)
    assert "strict" not in message


@pytest.mark.parametrize("name", ["no_such", "api_key", "tool_strict_level"])
async def test_options_that_training_does_not_heed_are_refused(engine: SpeakingEngine, name: str) -> None:
    with refuses(ConfigError, f"endpoint_kwargs.{name}"):
        await openai_app.openai_app(engine, MODEL, None, {name: "function"})  # type: ignore[arg-type]


WITHOUT_TOKEN: list[tuple[str, dict[str, str]]] = [
    *((form, {}) for form in ("", "/s/", "/s/guess", "/agent/a", "/s/guess/agent/a")),
    *(("", {name: value}) for name, value in (("authorization", "Bearer guess"), ("x-api-key", "guess"))),
]


async def test_beyond_loopback_no_route_answers_without_a_token(engine: SpeakingEngine) -> None:
    """None of vLLM's own, of pages about them, nor of those that are served. With a token only these are there, by
    whatever name the endpoint is called.
    """
    make_app = functools.partial(openai_app.openai_app, engine, MODEL, options=OPTIONS)
    async with serving(make_app, "0.0.0.0", "host.docker.internal") as gateway:
        session = await opened(gateway)
        token, port = session.token, gateway.url.rpartition(":")[2]
        paths = {route.path for route in gateway._app.routes} | ROUTES | {"/docs", "/openapi.json", "/redoc", "/"}
        assert {"/health", "/metrics", "/v1/models", "/tokenize", "/v1/chat/completions"} <= paths
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url=gateway.url) as asking:
            for path, (form, headers), method in itertools.product(paths, WITHOUT_TOKEN, ("GET", "POST", "OPTIONS")):
                answer = await asking.request(method, form + path, headers=headers)
                assert answer.status_code == 401, (method, form + path, headers)
            for path in paths - ROUTES:
                assert (await asking.get(f"/s/{token}{path}")).status_code == 404, path
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers={"host": gateway.url[7:]}) as asking:
            assert (await asking.get("/v1/models")).status_code == 401
            for form, headers in ((f"/s/{token}", {}), ("", {"x-api-key": token})):
                assert (await asking.get(f"{form}/v1/models", headers=headers)).json()["data"][0]["id"] == "policy"
        assert session.recording.calls == []


# --- parsers ----------------------------------------------------------------------------------------------------------
KEY = "tool_parser"
SCHEMAS: list[dict[str, Any]] = [{"type": "function", "function": ADD | {"description": "Add."}}]
XML = "<tool_call>|<function=add>|<parameter=a>|2|</parameter>|<parameter=b>|3|</parameter>|</function>|</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("hermes", "It is 5.", []),
        ("hermes", "So:\n" + call("add", '{"a": 2, "b": 3}') * 2, [("add", {"a": 2, "b": 3})] * 2),
        ("hermes", "<tool_call>\nadd(2, 3)\n</tool_call>", []),
        ("qwen3_xml", "<think>\nI add.\n</think>\n\n" + XML.replace("|", "\n"), [("add", {"a": 2, "b": 3})]),
        ("qwen3_xml", "It is 5.", []),
        ("pythonic", "[add(a=2, b=3), add(a=4, b=5)]", [("add", {"a": 2, "b": 3}), ("add", {"a": 4, "b": 5})]),
    ],
)
def test_calls_are_found(name: str, text: str, found: list[tuple[str, Any]]) -> None:
    tokenizer = tokenizer_of()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])  # which Qwen's tokenizers have
    parse = vllm_parser(name, tokenizer, SCHEMAS, key=KEY)
    assert [(each.name, json.loads(each.arguments)) for each in parse(text)] == found


def test_a_parser_that_remembers_a_text_is_not_asked_about_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Remembers:
        def __init__(self, *given: Any) -> None:
            self.seen = ""

        def parse(self, text: str, *given: Any, **options: Any) -> tuple[None, None, list[ToolCall]]:
            self.seen += text
            return None, None, [ToolCall(self.seen, "{}")]

    monkeypatch.setattr(openai_app.ParserManager, "get_parser", lambda *given, **options: Remembers)
    parse = vllm_parser("hermes", tokenizer_of(), SCHEMAS, key=KEY)
    assert [parse(text)[0].name for text in ("one", "two")] == ["one", "two"]


@pytest.mark.parametrize("name", ["hermess", "llama3_json"])
def test_a_parser_that_is_not_there_or_needs_other_tokens(name: str) -> None:
    with refuses(ConfigError, f"{KEY}={name}"):
        vllm_parser(name, tokenizer_of(), SCHEMAS, key=KEY)
