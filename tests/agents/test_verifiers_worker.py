"""Environments of verifiers: what becomes of an episode of a made-up one. A real one: e2e/test_verifiers_run.py."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from grpo_dist.agents import verifiers_worker
from tests.messages import refuses


def trace(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"reward": 0.5, "metrics": {"moves": 3, "odd": None}, "is_timeout": False, "errors": []} | values
    )


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A verifiers whose every episode is `outcome`, and that notes its settings."""
    found = SimpleNamespace(outcome=None, made=[], context=None, served=[], shared_tools=[])

    class Taskset(list):
        config = None

        def toolsets(self, config: Any) -> list[Any]:
            return found.shared_tools

    class Env:
        def __init__(self, config: dict[str, Any]) -> None:
            found.made.append(config)
            texts = [SimpleNamespace(prompt_text="1+1=?", name=None), SimpleNamespace(prompt_text="", name="two")]
            self.taskset = Taskset(SimpleNamespace(data=data) for data in texts)

        @asynccontextmanager
        async def serving(self) -> Any:
            found.served.append(self)
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
    monkeypatch.setattr(verifiers_worker, "_open", AsyncExitStack())
    return found


def play(**task: Any) -> dict[str, Any]:
    asked = {"taskset": "additions", "index": 1, **task}
    return asyncio.run(verifiers_worker.play(asked, "http://127.0.0.1:7/v1", "secret"))


def test_the_environment_gives_the_reward_and_the_policy_is_the_only_model(made_up: SimpleNamespace) -> None:
    made_up.outcome = SimpleNamespace(ok=True, traces=[trace(), trace(reward=1.0, is_timeout=True)], errors=[])
    assert play() == {"reward": 1.5, "metrics": {"moves": 3}, "truncated": True}
    play(env={"agent": {"max_turns": 3}})
    play()
    ours = {"harness": {"id": "verifiers_harness"}, "runtime": {"type": "subprocess"}}
    assert made_up.made == [
        {"taskset": {"id": "additions"}, "agent": ours},
        {"taskset": {"id": "additions"}, "agent": ours | {"max_turns": 3}},
    ], "one for each kind of settings"
    assert made_up.context.client.base_url == "http://127.0.0.1:7/s/secret/v1"


def test_only_tools_that_tasks_share_are_served_beyond_an_episode(made_up: SimpleNamespace) -> None:
    made_up.outcome = SimpleNamespace(ok=True, traces=[trace()], errors=[])
    play()
    assert made_up.served == []
    made_up.shared_tools = ["search"]
    for _ in range(2):
        play(env={"agent": {"max_turns": 1}})
    assert len(made_up.served) == 1


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
