"""vLLM's server: what it is started with, its app in training, and what stands before it; tests/cli/test_serve.py."""

import asyncio
import functools
import itertools
import json
import socket
import tempfile
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
import uvicorn
from starlette import responses
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from grpo_dist import hosts
from grpo_dist.agents.gateway import ROUTES
from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.base import Response, ToolCall
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm import openai_app
from grpo_dist.engines.vllm.front import FORMS, Front, FrontSettings
from grpo_dist.engines.vllm.openai_app import server_arguments, vllm_parser
from grpo_dist.engines.vllm.server import TimedProtocol, listen
from grpo_dist.engines.vllm.starting import quiet_environment
from grpo_dist.errors import ConfigError
from tests.agents.gateways import opened, serving
from tests.agents.speaking import MESSAGES, call, tokenizer_of
from tests.engines.vllm.speaking_engine import OPTIONS, SpeakingEngine
from tests.messages import refuses, says
from tests.worker_settings import changed, engine_settings

CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
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
    with refuses(ConfigError, "actor_rollout_ref.rollout.engine_kwargs.vllm", "no_such"):
        arguments(settings=changed(SETTINGS, vllm={"no_such": 1}))


# --- requests of agents in training ------------------------------
INTEGER = {"type": "integer"}
ADD: dict[str, Any] = {"name": "add", "parameters": {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}}
STRICT = {
    CHAT: {"messages": MESSAGES, "tools": [{"type": "function", "function": ADD | {"strict": True}}]},
    RESPONSES: {"input": "2+3?", "tools": [{"type": "function", "strict": True, **ADD}]},
    ANTHROPIC: {"messages": MESSAGES, "max_tokens": 300}
    | {"tools": [{"name": "add", "strict": True, "input_schema": ADD["parameters"]}]},
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
        pytest.param(CHAT, {}, "hermes", 2, marks=pytest.mark.deep),
        pytest.param(CHAT, ONE_CALL, "hermes", 1, marks=pytest.mark.deep),
        (CHAT, {"tool_choice": "auto", "response_format": {"type": "text"}}, "hermes", 2),
        pytest.param(RESPONSES, {"text": {"format": {"type": "text"}}}, "hermes", 2, marks=pytest.mark.deep),
        (RESPONSES, ONE_CALL, "hermes", 1),
        (ANTHROPIC, {}, "hermes", 2),
        pytest.param(
            ANTHROPIC,
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "hermes",
            1,
            marks=pytest.mark.deep,
        ),
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
        pytest.param(
            CHAT,
            {"tool_choice": {"type": "function", "function": {"name": "add"}}},
            ["tool_choice=function"],
            marks=pytest.mark.deep,
        ),
        pytest.param(
            CHAT, {"response_format": {"type": "json_object"}}, ["response_format=json_object"], marks=pytest.mark.deep
        ),
        (CHAT, {"structured_outputs": {"regex": "a+"}, **ONE_CALL}, ["structured_outputs"]),
        (CHAT, {"n": 2}, ["n"]),
        (CHAT, {"logit_bias": {"5": 100}}, ["logit_bias"]),
        (CHAT, {"frequency_penalty": 1.0}, ["frequency_penalty"]),
        (CHAT, {"logprobs": True, "top_logprobs": 3}, ["top_logprobs"]),
        pytest.param(RESPONSES, {"tool_choice": "required"}, ["tool_choice=required"], marks=pytest.mark.deep),
        (RESPONSES, {"text": {"format": JSON_FORM}}, ["text.format=json_schema"]),
        (ANTHROPIC, {"tool_choice": {"type": "any"}}, ["tool_choice=any"]),
        pytest.param(
            ANTHROPIC,
            {"output_config": {"format": JSON_FORM}},
            ["output_config.format=json_schema"],
            marks=pytest.mark.deep,
        ),
    ],
)
async def test_what_changes_the_samples_is_refused_by_what_stands_in_the_request(
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
    """None of vLLM's own; with a token those of agents, by whatever name the endpoint is called."""
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


# --- parsers ------------------------------
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


# --- before the app: who is let in, and what fills a request ------------------------------
SAMPLED = {"temperature": 0.0, "top_p": 0.9, "top_k": -1}
USAGE = Usage(3, "Be brief.", {}, {**SAMPLED, "max_tokens": 7, "stop": ["###"]})
SYSTEM = {"role": "system", "content": "Be brief."}
BEGUN = {"role": "assistant", "content": "Let me see:"}
RHYME = {"role": "system", "content": "Rhyme."}
HELLO = {"role": "user", "content": "Hello"}
TEXT = "/v1/completions"
OWN = {"temperature": 0.7, "top_p": 1.0, "top_k": 5, "max_completion_tokens": 50, "stop": [], "n": 3}
OF_RESPONSES = {"instructions": "Be brief.", "max_output_tokens": 7, "stop": ["###"]}
NOTHING = {"temperature": None, "stop": None, "max_tokens": None}


def ask(path: str, body: Any, *, usage: Usage = USAGE, token: str = "", headers: Any = None, **more: Any) -> Any:
    """The status, and the body as the app behind the front has it."""

    async def echo(request: Request) -> responses.Response:
        received = await request.body()
        assert int(request.headers["content-length"]) == len(received)
        return responses.Response(received, media_type="application/json")

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
        (RESPONSES, {"input": "Hello"}, OF_RESPONSES),
        (ANTHROPIC, {"messages": [HELLO], "max_tokens": 50}, {"system": "Be brief.", "stop_sequences": ["###"]}),
        (TEXT, {"prompt": "Hello"}, {"max_tokens": 7, "stop": ["###"]}),
        # null says nothing
        (CHAT, {"messages": [SYSTEM, HELLO], **NOTHING}, {"max_tokens": 7, "stop": ["###"]}),
        (RESPONSES, {"input": [HELLO], "instructions": None}, OF_RESPONSES),
        # what a request says is kept
        (CHAT, {"messages": [RHYME | {"role": "developer"}, HELLO], **OWN}, OWN),
        (RESPONSES, {"input": [HELLO], "instructions": "Rhyme.", "max_output_tokens": 9}, {"stop": ["###"]}),
        (ANTHROPIC, {"messages": [RHYME, HELLO], "max_tokens": 9}, {"stop_sequences": ["###"]}),
        ("/tokenize", {"messages": [HELLO], **OWN}, OWN),  # of another route all is left alone
    ],
)
def test_where_a_request_says_nothing_it_is_asked_as_the_run_asked(path: str, said: Any, added: Any) -> None:
    assert ask(path, said) == (200, said | SAMPLED | added)


@pytest.mark.parametrize(
    ("last", "more", "goes_on"),
    [
        (BEGUN, {}, True),
        (BEGUN | {"content": [{"type": "text", "text": "Let me see:"}]}, {}, True),
        (BEGUN, {"add_generation_prompt": True}, False),
        (BEGUN, {"continue_final_message": False}, False),
        (BEGUN | {"content": "", "tool_calls": [{}]}, {}, False),
        (BEGUN | {"tool_calls": [{}]}, {}, False),
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
    cut, send = AsyncMock(return_value={"type": "http.disconnect"}), AsyncMock()
    app = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(front=FrontSettings())))
    scope = {"type": "http", "method": "POST", "path": TEXT, "headers": [], "app": app}
    await Front(None)(scope, cut, send)
    assert send.await_args_list[0].args[0]["status"] == 413


@pytest.mark.parametrize("path", [CHAT, "/invocations", "/metrics", "/v1/models", "/healthy", "//health"])
def test_every_route_wants_the_token_but_health(path: str) -> None:
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
    assert ask("/health", {}, token="secret")[0] == 200 == ask(path, {}, token="secret", method="OPTIONS")[0]


def test_without_a_token_the_name_must_be_this_machine() -> None:
    """What a web page sends that has turned its name to the loopback address."""
    evil = {"Host": "evil.example:8000"}
    for path in ("/v1/models", "/health", "/tokenize"):
        status, answer = ask(path, {}, headers=evil)
        assert (status, answer["error"]["code"]) == (403, 403)
        assert "evil.example" in answer["error"]["message"]
        assert ask(path, {}, headers={"Host": "127.0.0.1:8000"})[0] == 200
        assert ask(path, {}, token="t", headers=evil | {"x-api-key": "t"})[0] == 200


# --- the server ------------------------------
def test_a_port_is_free_again_and_an_address_of_another_machine_is_refused() -> None:
    """One that is taken: tests/cli/test_serve.py."""
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    with listen("127.0.0.1", port) as again:
        assert again.family is socket.AF_INET
    with refuses(ConfigError, "--host 192.0.2.1", "--port 0"):  # for documentation, RFC 5737
        listen("192.0.2.1", 0)


GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "sent"),
    [
        pytest.param(0, b"", id="nothing", marks=pytest.mark.deep),
        pytest.param(0, GET[:21], id="headers", marks=pytest.mark.deep),
        pytest.param(0, b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc", id="body"),
        pytest.param(2, GET[:9], id="behind others"),
    ],
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
