"""What vLLM's server is started with. tests/cli/test_serve.py starts one."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import uvicorn

from grpo_dist import hosts
from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.arguments import quiet_environment
from grpo_dist.engines.vllm.server import TimedProtocol, listen, server_arguments
from grpo_dist.errors import ConfigError
from tests.messages import refuses
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
    assert found.middleware == ["grpo_dist.engines.vllm.openai_app.Front"]
    assert (found.front.token, found.api_key) == ("secret", None)
    assert not found.disable_log_stats, "/metrics has nothing without them"


def test_a_responses_usual_length_is_one_that_fits() -> None:
    assert arguments().front.usage.sampling == {"temperature": 0.0, "max_tokens": 96, "stop": ["###"]}
    longer = replace(SETTINGS, max_model_len=400)
    assert arguments(settings=longer).front.usage.sampling["max_tokens"] == 200


def test_the_models_own_sampling_counts_where_there_is_no_run() -> None:
    assert arguments().generation_config == "vllm"
    assert arguments(usage=Usage()).generation_config == "auto"
    assert arguments(usage=Usage()).default_chat_template_kwargs is None


def test_options_of_vllm_win() -> None:
    more = ["--max-num-seqs", "5", "--enable-auto-tool-choice", "--tool-call-parser=hermes", "--middleware", "a.B"]
    found = arguments(*more, "--default-chat-template-kwargs", '{"x": 1}')
    assert (found.max_num_seqs, found.tool_call_parser, found.enable_auto_tool_choice) == (5, "hermes", True)
    assert found.middleware == ["a.B", "grpo_dist.engines.vllm.openai_app.Front"]
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


def test_a_taken_port_is_refused_at_once() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert port > 0
        with refuses(ConfigError, "--host 127.0.0.1", f"--port {port}", 0):
            listen("127.0.0.1", port)
    with listen("127.0.0.1", port) as again:
        assert again.family is socket.AF_INET


def test_an_address_of_another_machine_is_refused() -> None:
    with refuses(ConfigError, "--host 192.0.2.1", "--port 0"):  # for documentation, RFC 5737
        listen("192.0.2.1", 0)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connected(test: Callable[[Connection], Awaitable[None]], answer_s: float = 0.0) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(answer_s)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run() -> None:
        server = uvicorn.Server(uvicorn.Config(app, port=0, http=TimedProtocol, lifespan="off", log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        connection = await asyncio.open_connection("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
        await asyncio.wait_for(test(connection), 30)
        connection[1].close()
        server.should_exit = True
        await serving

    asyncio.run(run())


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc"])
def test_a_request_that_does_not_come(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "REQUEST_S", 0.2)

    async def wait(connection: Connection) -> None:
        connection[1].write(sent)
        assert b"200" not in await connection[0].read()  # until it is closed

    connected(wait)


def test_an_answer_may_take_longer_and_the_next_request_has_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "REQUEST_S", 0.2)

    async def ask_twice(connection: Connection) -> None:
        for _ in range(2):
            connection[1].write(GET)
            assert (await connection[0].readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        connection[1].write(GET[:9])
        assert await connection[0].read() == b""

    connected(ask_twice, answer_s=0.5)
