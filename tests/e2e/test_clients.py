"""The clients that agents are written with, as their projects publish them, against training's endpoint."""

import asyncio
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.agents.gateway import Session
from grpo_dist.agents.recording import Recording
from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.engines.vllm import openai_app
from grpo_dist.rewards.scorer import OutputLines, printing_to
from tests.agents.gateways import serving
from tests.agents.speaking import call
from tests.engines.vllm.speaking_engine import MODEL, OPTIONS, SpeakingEngine

# What each is installed from; None: this interpreter has it.
CLIENTS: dict[str, list[str] | None] = {
    "openai": None,
    "litellm": ["litellm"],
    "langchain": ["langchain-openai", "langchain-anthropic"],
    "openai_agents": ["openai-agents"],
    "anthropic": ["anthropic"],
    "pydantic_ai": ["pydantic-ai-slim[openai,anthropic]"],
    "instructor": ["instructor"],
    "smolagents": ["smolagents[openai]"],
}


def says(prompt: str) -> str:
    """What the policy says: a call of `add` where it is told of one and nothing has answered yet, else 5."""
    *_, asked = prompt.split("<|im_start|>user\n")
    if '"name": "add"' not in prompt or "<tool_response>" in asked:
        return "5"
    return "\n".join([call("add", '{"a": 2, "b": 3}')] * (2 if "twice" in asked else 1))


def interpreter(folder: Path, packages: list[str] | None) -> str:
    if packages is None:
        return sys.executable
    python, uv = folder / "env" / "bin" / "python", Path(sys.executable).parent / "uv"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder / "env"], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *packages], check=True)
    return str(python)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "client",
    [pytest.param(name, marks=pytest.mark.long if given else pytest.mark.deep) for name, given in CLIENTS.items()],
)
async def test_a_client_uses_tools_as_it_does_elsewhere(client: str, tmp_path: Path) -> None:
    """Whatever it writes into requests by itself; what forces a form is refused by the key that stands there."""
    engine = SpeakingEngine()
    tokenizer = engine.renderer.get_tokenizer()

    async def sample(ids: list[int], sampling: SamplingSettings) -> Response:
        said = [*tokenizer.encode(says(tokenizer.decode(ids)), add_special_tokens=False), tokenizer.eos_token_id]
        return Response(said, [-0.5] * len(said), False, [0] * len(said))

    session = Session(Recording(SamplingSettings(1, 1.0, 1.0, -1, 4000, 0), tokenizer, 8000, 100_000), sample)
    printed = OutputLines()
    openai_app._say_that_tools_are_free.cache_clear()
    async with serving(functools.partial(openai_app.openai_app, engine, MODEL, options=OPTIONS)) as gateway:
        with printing_to(printed):  # as a worker opens it
            await gateway.open(session)
        python = await asyncio.to_thread(interpreter, tmp_path, CLIENTS[client])
        program = (python, Path(__file__).with_name("clients.py"), client, f"{gateway.url}/v1", session.token)
        playing = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        told, errors = await playing.communicate()
    found: dict[str, Any] = dict(json.loads(line) for line in told.splitlines() if line.startswith(b"["))
    assert found, errors.decode()[-3000:]
    assert not any(found.values()), "\n".join(f"{case}: {fault}" for case, fault in found.items() if fault)
    assert bool(session.recording.calls) == any("refused" not in case for case in found), "what is sampled is recorded"
    said = [line for line in printed.take()[0] if "endpoint_kwargs.tool_call_parser" in line]  # others import and print
    assert len(said) == any("strict" in case for case in found), "the run says once what is left out"
