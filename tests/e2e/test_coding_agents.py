"""Coding agents as their projects publish them, through training's endpoint; `-s` shows their versions."""

import asyncio
import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.agents.gateway import Session
from grpo_dist.agents.recording import Recording
from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.engines.vllm import openai_app
from grpo_dist.protocol.sequences import last_branch
from tests.agents.gateways import serving
from tests.agents.speaking import call
from tests.engines.vllm.speaking_engine import MODEL, OPTIONS, SpeakingEngine

MOST = 200_000  # tokens, which are bytes: Claude Code begins with 77,000 of its own
TASK = "Write the sum in task.txt into answer.txt."


@dataclass
class Agent:
    """A coding agent."""

    install: Sequence[Sequence[str]]  # commands, in a folder of their own; the last one tells the version
    command: Sequence[str]
    environment: dict[str, str]
    turns: Sequence[str]  # what the policy says
    follows: Sequence[int | None]  # by turn the one whose text it goes on from; None: it begins a branch


def bash(name: str, command: str, **more: str) -> str:
    return call(name, json.dumps({"command": command, **more}))


UV = str(Path(sys.executable).parent / "uv")
AGENTS = {
    # The parser of calls keeps the line break behind "I add.", and the template writes one more: turn 2 follows turn 0.
    "mini-swe-agent": Agent(
        [
            [UV, "venv", "--python", sys.executable, "env"],
            [UV, "pip", "install", "--python", "env/bin/python", "mini-swe-agent"],
            ["env/bin/python", "-c", "import importlib.metadata as m; print(m.version('mini-swe-agent'))"],
        ],
        ["env/bin/mini", "--yolo", "--exit-immediately", "--model", "openai/policy", "--task", TASK],
        {"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "{token}"}
        | {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        [
            bash("bash", "cat task.txt"),
            "I add.\n" + bash("bash", "echo 5 > answer.txt"),
            bash("bash", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ],
        [None, 0, 0],
    ),
    "claude-code": Agent(
        [
            ["npm", "install", "--no-audit", "--no-fund", "@anthropic-ai/claude-code"],
            ["node_modules/.bin/claude", "--version"],
        ],
        ["node_modules/.bin/claude", "--print", TASK, "--model", "policy", "--allowedTools", "Bash"],
        {"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_AUTH_TOKEN": "{token}"}
        | {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        [
            call("Agent", json.dumps({"description": "reads", "prompt": "Read.", "subagent_type": "general-purpose"})),
            bash("Bash", "cat task.txt", description="reads"),
            "2+3",
            bash("Bash", "echo 5 > answer.txt", description="writes"),
            "Done.",
        ],
        [None, None, 1, 0, 3],  # turns 1 and 2 are the sub-agent's
    ),
}


def installed(agent: Agent, folder: Path) -> str:
    """Its version; the test is skipped where it cannot be installed."""
    said = ""
    for command in agent.install:
        try:
            said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            why = " ".join(str(getattr(error, "stderr", error)).split())
            pytest.skip(f"{' '.join(command)}: {why[-500:]}")
    return said.strip()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", AGENTS)
async def test_a_coding_agent_becomes_the_tokens_that_were_sampled(name: str, tmp_path: Path) -> None:
    agent, engine = AGENTS[name], SpeakingEngine(MOST)
    print(name, await asyncio.to_thread(installed, agent, tmp_path))
    (work := tmp_path / "work").mkdir()
    (work / "task.txt").write_text("2+3\n")
    tokenizer: Any = engine.renderer.get_tokenizer()
    said = [[*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id] for turn in agent.turns]
    seen: list[list[int]] = []

    async def sample(ids: list[int], sampling: SamplingSettings) -> Response:
        turn = said[len(seen)]
        seen.append(ids)
        return Response(turn, [-0.5] * len(turn), False, [3] * len(turn))

    async with serving(functools.partial(openai_app.openai_app, engine, MODEL, options=OPTIONS)) as gateway:
        session = Session(Recording(SamplingSettings(1, 1.0, 1.0, -1, MOST, 0), tokenizer, MOST, 2 * MOST), sample)
        await gateway.open(session)
        own = {key: value.format(url=gateway.url, token=session.token) for key, value in agent.environment.items()}
        playing = await asyncio.create_subprocess_exec(
            tmp_path / agent.command[0],
            *agent.command[1:],
            cwd=work,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **own},  # nothing else of this machine's user
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        told = (await playing.communicate())[0].decode()[-3000:]
    calls, tree = session.recording.calls, session.recording.tree
    assert [each.sampled for each in calls] == said, told
    assert tree is not None
    assert (work / "answer.txt").read_text() == "5\n", told
    assert [None if each.parent is None else calls.index(each.parent) for each in calls] == agent.follows
    row = tree.response
    trained = [token for token, mask in zip(row.token_ids, row.mask or [], strict=True) if mask]
    assert trained == [token for turn in said for token in turn]
    for prompt, each in zip(seen, calls, strict=True):  # a branch is what the policy has seen and said
        before, path = last_branch((row.predecessors or [])[: (each.place or 0) + 1])
        text = tree.prompt_ids[: len(tree.prompt_ids) + before + 1] + [row.token_ids[place] for place in path]
        assert text == prompt + each.sampled
