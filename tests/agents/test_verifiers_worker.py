"""Environments of verifiers: what becomes of an episode of a made-up one, and a real one in its own interpreter."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grpo_dist.agents import verifiers_worker
from grpo_dist.assets import resolve_model_path
from grpo_dist.data.tokenize import load_tokenizer
from grpo_dist.engines.settings import AgentSettings, EngineSettings, SamplingSettings
from grpo_dist.workers.reward import Task
from grpo_dist.workers.rollout import RolloutWorker
from tests.messages import refuses
from tests.processes import spawned

ADDITIONS = """
import re

import verifiers.v1 as vf

__all__ = ["Additions"]


class Data(vf.TaskData):
    answer: int


class Addition(vf.Task[Data]):
    @vf.reward()
    async def right(self, trace: vf.Trace) -> float:
        found = re.search(r"#### (\\d+)", str(trace.nodes[-1].message.content))
        return float(found is not None and int(found[1]) == self.data.answer)

    @vf.metric()
    async def nodes(self, trace: vf.Trace) -> float:
        return float(len(trace.nodes))


class Additions(vf.Taskset[Addition, vf.TasksetConfig]):
    def load(self):
        for a in range(100, 110):
            yield Addition(Data(prompt=f"{a}+23=?", answer=a + 23), self.config.task)
"""


def trace(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"reward": 0.5, "metrics": {"moves": 3, "odd": None}, "is_timeout": False, "errors": []} | values
    )


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A verifiers whose every episode is `outcome`, and that notes its settings."""
    found = SimpleNamespace(outcome=None, made=[], context=None)

    class Env:
        def __init__(self, config: dict[str, Any]) -> None:
            found.made.append(config)
            texts = [SimpleNamespace(prompt_text="1+1=?", name=None), SimpleNamespace(prompt_text="", name="two")]
            self.taskset = [SimpleNamespace(data=data) for data in texts]

        @asynccontextmanager
        async def serving(self) -> Any:
            yield

        def slots(self, task: Any) -> list[Any]:
            return [task]

        async def run_slot(self, slot: Any, context: Any) -> Any:
            found.context = context
            return found.outcome

    config = SimpleNamespace(model_validate=lambda values: values)
    v1 = ModuleType("verifiers.v1")
    vars(v1).update(
        SingleAgentEnv=Env, SingleAgentEnvConfig=config, ModelContext=SimpleNamespace, EvalClientConfig=SimpleNamespace
    )
    package = ModuleType("verifiers")
    package.v1 = v1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", v1)
    monkeypatch.setattr(verifiers_worker, "_serving", {})
    monkeypatch.setattr(verifiers_worker, "_starting", asyncio.Lock())
    return found


def play(**task: Any) -> dict[str, Any]:
    asked = {"taskset": "additions", "index": 1, **task}
    return asyncio.run(verifiers_worker.play(asked, "http://127.0.0.1:7/v1", "secret"))


def test_the_environment_gives_the_reward_and_the_policy_is_the_only_model(made_up: SimpleNamespace) -> None:
    made_up.outcome = SimpleNamespace(ok=True, traces=[trace(), trace(reward=1.0, is_timeout=True)], errors=[])
    assert play() == {"reward": 1.5, "metrics": {"moves": 3}, "truncated": True}
    play(env={"agent": {"max_turns": 3}})
    play()
    ours = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    assert made_up.made == [
        {"taskset": {"id": "additions"}, "agent": ours},
        {"taskset": {"id": "additions"}, "agent": ours | {"max_turns": 3}},
    ], "one for each kind of settings"
    assert made_up.context.client.base_url == "http://127.0.0.1:7/s/secret/v1"


def test_an_episode_with_errors_has_failed(made_up: SimpleNamespace) -> None:
    error = SimpleNamespace(type="ProviderError", message="connection refused")
    made_up.outcome = SimpleNamespace(ok=False, traces=[trace(reward=0.0, errors=[error])], errors=[])
    with refuses(RuntimeError, "ProviderError", "connection refused"):
        play()


def test_rows_name_the_task(made_up: SimpleNamespace, tmp_path: Path) -> None:
    assert verifiers_worker.write_rows("additions", str(tmp_path / "all.jsonl")) == 2
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["1+1=?", "two"]
    assert rows[1]["extra_info"] == {"taskset": "additions", "index": 1}
    assert verifiers_worker.write_rows("additions", str(tmp_path / "some.jsonl"), 1) == 1


@pytest.mark.long  # installs verifiers into an environment of its own
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_an_installed_environment_is_played(local_ray: None, tmp_path: Path) -> None:
    """It knows nothing of grpo_dist, and its interpreter has none of our packages."""
    uv, python = Path(sys.executable).parent / "uv", tmp_path / "env" / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "env"], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, "verifiers==0.4.0", "uv"], check=True)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "additions.py").write_text(ADDITIONS)
    rows = tmp_path / "rows.jsonl"
    subprocess.run([python, verifiers_worker.__file__, "additions", rows, "3"], check=True)
    (_, row, _) = map(json.loads, rows.read_text().splitlines())
    agent = AgentSettings("external", {"play": f"{verifiers_worker.__file__}:play", "python": str(python)})
    model = resolve_model_path("builtin:tiny-qwen3")
    limits = (1, 256, 64, 1024, 0.8, 0.0625, True, False, 0)
    settings = EngineSettings(model, "cpu", "float32", False, *limits, needs_tokenizer=True, agent=agent)
    task = Task(row["data_source"], "", row["extra_info"], [{"role": "user", "content": row["prompt"]}])
    with spawned("rollout", RolloutWorker, [()], env={"OMP_NUM_THREADS": "1"}) as group:
        group.call_each("start", "start", [(settings,)])
        arguments = "uid", np.array([4], np.int32), SamplingSettings(8, 1.0, 1.0, -1, 60, 1), task
        (label, _), data = group.gather([group.submit(0, "generate", "generate", *arguments)])[0]
        group.call_all("shutdown", "shutdown")
    tokenizer = load_tokenizer(model, trust_remote_code=False)
    for reward, prompt, response in zip(
        label.small["episode_reward"], data["prompts"].rows(), data["responses"].rows(), strict=True
    ):
        assert "101+23=?" in tokenizer.decode(prompt)
        assert reward == ("#### 124" in tokenizer.decode(response))
    assert label.small["reward_extra/nodes"].tolist() == [2.0] * 8
