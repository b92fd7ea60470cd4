"""Environments of verifiers: what becomes of an episode of a made-up one. A real one: e2e/test_verifiers_run.py."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
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
    """A verifiers whose every episode is `outcome`, and that notes its settings; `blocked` holds a taskset back."""
    found = SimpleNamespace(outcome=None, made=[], context=None, served=[], shared_tools=[], read=[], agents=["agent"])
    found.blocked = threading.Event()

    class Taskset:
        config = None

        def __init__(self, name: str) -> None:
            self.name, self.bounded = name, name != "endless"

        def __iter__(self) -> Iterator[Any]:
            if self.name == "blocked":
                found.blocked.wait(20)
            for index in itertools.count() if not self.bounded else range(2):
                found.read.append(index)
                yield SimpleNamespace(data=SimpleNamespace(prompt_text="" if index else "1+1=?", name=f"task {index}"))

        def toolsets(self, config: Any) -> list[Any]:
            return found.shared_tools

    class AgentConfig:
        pass

    class Env:
        def __init__(self, config: dict[str, Any]) -> None:
            found.made.append(config)
            self.taskset = Taskset(config["taskset"]["id"])

        @asynccontextmanager
        async def serving(self) -> Any:
            found.served.append(self)
            yield

        def slots(self, task: Any) -> list[Any]:
            return [task]

        async def run_slot(self, slot: Any, context: Any) -> Any:
            found.context, found.slot = context, slot
            return found.outcome

    class Own(Env):
        pass

    def config_type(taskset: str, env: str) -> SimpleNamespace:
        found.asked = taskset, env
        fields = {name: SimpleNamespace(default=AgentConfig()) for name in found.agents}
        fields |= {"timeout": SimpleNamespace(default=3)}
        return SimpleNamespace(model_validate=lambda values: values, model_fields=fields)

    v1 = ModuleType("verifiers.v1")
    vars(v1).update(
        environment_class=lambda taskset, env: Own if found.agents != ["agent"] else Env,
        env_config_type=config_type,
        AgentConfig=AgentConfig,
        ModelContext=SimpleNamespace,
        EvalClientConfig=SimpleNamespace,
    )
    package = ModuleType("verifiers")
    package.v1 = v1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", v1)
    monkeypatch.setattr(verifiers_worker, "_serving", {})
    monkeypatch.setattr(verifiers_worker, "_starting", defaultdict(asyncio.Lock))
    monkeypatch.setattr(verifiers_worker, "_open", AsyncExitStack())
    found.outcome = SimpleNamespace(ok=True, traces=[trace()], errors=[])
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
    assert [row["prompt"] for row in rows] == ["1+1=?", "task 1"]
    assert rows[1]["extra_info"] == {"taskset": "additions", "index": 1}
    assert verifiers_worker.write_rows("additions", str(tmp_path / "some.jsonl"), 1) == 1
    assert verifiers_worker.write_rows("endless", str(tmp_path / "some.jsonl"), 3) == 3
    with refuses(ValueError, "endless", tmp_path / "rows.jsonl"):
        verifiers_worker.write_rows("endless", str(tmp_path / "rows.jsonl"))


def test_a_taskset_without_end_is_read_as_far_as_it_is_asked_for(made_up: SimpleNamespace) -> None:
    for index, read in ((3, 4), (1, 4), (4, 5)):
        play(taskset="endless", index=index)
        assert (made_up.slot.data.name, made_up.read) == (f"task {index}", list(range(read)))
    with refuses(IndexError, 7, 2):
        play(index=7)


async def test_a_taskset_that_does_not_come_holds_up_no_other_and_can_be_given_up(made_up: SimpleNamespace) -> None:
    def asked(taskset: str) -> Any:
        return verifiers_worker.play({"taskset": taskset, "index": 1}, "http://127.0.0.1:7/v1", "secret")

    waiting = [asyncio.create_task(asked("blocked")) for _ in range(40)]  # more than a pool has threads
    assert (await asyncio.gather(*[asked("additions") for _ in range(3)]))[0]["reward"] == 0.5
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    made_up.blocked.set()
    assert {answer["reward"] for answer in await asyncio.gather(*waiting[1:])} == {0.5}


def test_an_environment_of_the_tasksets_own_is_the_one_that_is_played(made_up: SimpleNamespace) -> None:
    made_up.agents = ["golfer"]
    play(env={"id": "best-of-n", "golfer": {"max_turns": 2}})
    assert made_up.asked == ("additions", "best-of-n")
    assert type(verifiers_worker._make("additions", {})).__name__ == "Own"
    ours = {"harness": {"id": "verifiers_harness"}, "runtime": {"type": "subprocess"}}
    assert made_up.made[0]["golfer"] == ours | {"max_turns": 2}
    assert "agent" not in made_up.made[0]


def test_an_environment_of_several_agents_is_refused(made_up: SimpleNamespace, tmp_path: Path) -> None:
    """They would be one policy with one reward, 0 where one agent wins what the other loses."""
    made_up.agents = ["player0", "player1"]
    with refuses(ValueError, "additions", "Own", "player0, player1"):
        play()
    with refuses(ValueError, "additions", "player0, player1"):
        verifiers_worker.write_rows("additions", str(tmp_path / "rows.jsonl"), 1)
    assert made_up.made == []
