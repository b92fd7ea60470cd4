"""The chat loop of verifiers' episodes, with made-up parts of verifiers and of the policy."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from grpo_dist.agents import verifiers_worker
from tests.messages import says

REPLY = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "policy",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "#### 2"}}],
}


@dataclass
class ProgramResult:
    exit_code: int
    stdout: str
    stderr: str


class NullHarness:
    """verifiers' own, which starts a program."""

    def resolve_prompt(self, data: Any) -> tuple[str | None, Any]:
        return data.system_prompt, data.prompt

    async def launch(self, *given: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return given, named


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, as verifiers imports it: by its file's name."""
    parts = {
        "verifiers": {},
        "verifiers.v1": {},
        "verifiers.v1.dialects": {},
        "verifiers.v1.dialects.chat": {"message_to_wire": lambda message: {"role": message.role, "content": "wired"}},
        "verifiers.v1.harnesses": {"NullHarness": NullHarness},
        "verifiers.v1.runtimes": {"ProgramResult": ProgramResult},
    }
    for name, values in parts.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    file = Path(verifiers_worker.__file__).with_name(f"{verifiers_worker.HARNESS}.py")
    spec = importlib.util.spec_from_file_location(verifiers_worker.HARNESS, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(
    harness: ModuleType, status: int = 200, tools: dict[str, str] | None = None, **data: Any
) -> tuple[Any, list[httpx.Request]]:
    """What an episode of a task comes to, and the requests at its endpoint, which are answered with a status."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(
            status, json=REPLY if status == 200 else {"error": {"message": "rollout stopped: enough"}}
        )

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    harness.CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", http_client=client)
    task = SimpleNamespace(**{"system_prompt": None, "prompt": "1+1=?"} | data)
    ctx = SimpleNamespace(model="policy")
    at = "http://127.0.0.1:7/v1", "secret"
    done = asyncio.run(
        harness.Chat().launch(ctx, "trace", "runtime", *at, tools or {}, task, tool_interception_url="t")
    )
    return done, asked


def test_a_task_without_tools_asks_once_in_this_process(harness: ModuleType) -> None:
    done, (request,) = launch(harness, system_prompt="Add.")
    assert done == ProgramResult(0, "", "")
    assert str(request.url) == "http://127.0.0.1:7/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer secret"
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1=?"}]
    assert json.loads(request.content) == {"model": "policy", "messages": messages}


def test_a_prompt_of_messages(harness: ModuleType) -> None:
    _, (request,) = launch(harness, prompt=[SimpleNamespace(role="user"), SimpleNamespace(role="assistant")])
    wired = [{"role": "user", "content": "wired"}, {"role": "assistant", "content": "wired"}]
    assert json.loads(request.content)["messages"] == wired


def test_a_refused_request_is_a_program_that_failed(harness: ModuleType) -> None:
    done, asked = launch(harness, status=400)
    assert done.exit_code == 1
    says(done.stderr, "400", "rollout stopped: enough")
    assert len(asked) == 1


def test_a_task_with_tools_gets_the_program(harness: ModuleType) -> None:
    (given, named), asked = launch(harness, tools={"search": "http://127.0.0.1:8"})
    assert given[3:6] == ("http://127.0.0.1:7/v1", "secret", {"search": "http://127.0.0.1:8"})
    assert named == {"tool_interception_url": "t"}
    assert asked == []


def test_verifiers_finds_one_harness(harness: ModuleType) -> None:
    assert [getattr(harness, name) for name in harness.__all__] == [harness.Chat]
