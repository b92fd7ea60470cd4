"""Environments of verifiers and its chat loop, with made-up parts of it. A real one: e2e/test_other_starts.py."""

import asyncio
import importlib.util
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

import httpx
import pytest
from openai import AsyncOpenAI

from grpo_dist.agents import verifiers_worker
from tests.messages import refuses, says
from tests.records import json_lines

ENDPOINT = "http://127.0.0.1:7/v1", "secret"
OURS = {"harness": {"id": "verifiers_harness"}, "runtime": {"type": "subprocess"}}


def install(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    """Modules of verifiers by the end of their names, with what they hold."""
    for name, values in {"verifiers": {}, **{f"verifiers.{name}": values for name, values in modules.items()}}.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["verifiers"].v1 = sys.modules["verifiers.v1"]


def trace(**values: Any) -> SimpleNamespace:
    usual = {"reward": 0.5, "metrics": {"moves": 3, "odd": None}, "is_timeout": False, "errors": []}
    return SimpleNamespace(**usual | values)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A verifiers whose every episode is `outcome`, and that notes its settings; `blocked` holds a taskset back."""
    found = SimpleNamespace(made=[], context=None, served=[], shared_tools=[], read=[], agents=["agent"])
    found.outcome = SimpleNamespace(ok=True, traces=[trace()], errors=[])
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

    class AgentConfig: ...

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

    class Own(Env): ...

    def config_type(taskset: str, env: str) -> SimpleNamespace:
        found.asked = taskset, env
        fields = {name: SimpleNamespace(default=AgentConfig()) for name in found.agents}
        fields |= {"timeout": SimpleNamespace(default=3)}
        return SimpleNamespace(model_validate=lambda values: values, model_fields=fields)

    v1 = {"AgentConfig": AgentConfig, "ModelContext": SimpleNamespace, "EvalClientConfig": SimpleNamespace}
    v1 |= {"environment_class": lambda *_: Env if found.agents == ["agent"] else Own, "env_config_type": config_type}
    install(monkeypatch, v1=v1)
    monkeypatch.setattr(verifiers_worker, "_serving", {})
    monkeypatch.setattr(verifiers_worker, "_starting", defaultdict(asyncio.Lock))
    monkeypatch.setattr(verifiers_worker, "_open", AsyncExitStack())
    return found


def play(**task: Any) -> dict[str, Any]:
    return asyncio.run(verifiers_worker.play({"taskset": "additions", "index": 1, **task}, *ENDPOINT))


def test_the_environment_gives_the_reward_and_the_policy_is_the_only_model(made_up: SimpleNamespace) -> None:
    made_up.outcome = SimpleNamespace(ok=True, traces=[trace(), trace(reward=1.0, is_timeout=True)], errors=[])
    assert play() == {"reward": 1.5, "metrics": {"moves": 3}, "truncated": True}
    play(env={"agent": {"max_turns": 3}})
    play()
    assert made_up.made == [
        {"taskset": {"id": "additions"}, "agent": OURS},
        {"taskset": {"id": "additions"}, "agent": OURS | {"max_turns": 3}},
    ], "one for each kind of settings"
    assert made_up.context.client.base_url == "http://127.0.0.1:7/s/secret/v1"
    assert made_up.served == []
    made_up.shared_tools = ["search"]
    for _ in range(2):
        play(env={"agent": {"max_turns": 1}})
    assert len(made_up.served) == 1, "only tools that tasks share are served beyond an episode"
    error = SimpleNamespace(type="ProviderError", message="connection refused")
    made_up.outcome = SimpleNamespace(ok=False, traces=[trace(reward=0.0, errors=[error])], errors=[])
    with refuses(RuntimeError, "ProviderError", "connection refused"):
        play()


def test_rows_name_the_task(made_up: SimpleNamespace, tmp_path: Path) -> None:
    assert verifiers_worker.write_rows("additions", str(tmp_path / "all.jsonl")) == 2
    rows = json_lines(tmp_path / "all.jsonl")
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
        return verifiers_worker.play({"taskset": taskset, "index": 1}, *ENDPOINT)

    waiting = [asyncio.create_task(asked("blocked")) for _ in range(40)]  # more than a pool has threads
    assert (await asyncio.gather(*[asked("additions") for _ in range(3)]))[0]["reward"] == 0.5
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    made_up.blocked.set()
    assert {answer["reward"] for answer in await asyncio.gather(*waiting[1:])} == {0.5}


def test_an_environment_of_a_tasksets_own_is_played_if_of_one_agent(made_up: SimpleNamespace, tmp_path: Path) -> None:
    """Several would be one policy with one reward, 0 where one agent wins what the other loses."""
    made_up.agents = ["golfer"]
    play(env={"id": "best-of-n", "golfer": {"max_turns": 2}})
    assert made_up.asked == ("additions", "best-of-n")
    assert type(verifiers_worker._make("additions", {})).__name__ == "Own"
    assert made_up.made[0]["golfer"] == OURS | {"max_turns": 2}
    assert "agent" not in made_up.made[0]
    made_up.agents = ["player0", "player1"]
    with refuses(ValueError, "additions", "Own", "player0, player1"):
        play()
    with refuses(ValueError, "additions", "player0, player1"):
        verifiers_worker.write_rows("additions", str(tmp_path / "rows.jsonl"), 1)
    assert len(made_up.made) == 2


# --- its chat loop -------------------------------------------------------------------------------------------------
CHOICE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "#### 2"}}
REPLY = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [CHOICE]}
REFUSAL = {"error": {"message": "rollout stopped: enough"}}


class NullHarness:
    """verifiers' own, which starts a program."""

    def resolve_prompt(self, data: Any) -> tuple[str | None, Any]:
        return data.system_prompt, data.prompt

    async def launch(self, *given: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return given, named


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, as verifiers imports it: by its file's name."""
    chat = {"message_to_wire": lambda message: {"role": message.role, "content": "wired"}}
    harnesses, runtimes = {"NullHarness": NullHarness}, {"ProgramResult": SimpleNamespace}
    parts = {"v1.dialects.chat": chat, "v1.harnesses": harnesses, "v1.runtimes": runtimes}
    install(monkeypatch, **{"v1": {}, "v1.dialects": {}} | parts)
    file = Path(verifiers_worker.__file__).with_name(f"{verifiers_worker.HARNESS}.py")
    spec = importlib.util.spec_from_file_location(verifiers_worker.HARNESS, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(harness: Any, status: int = 200, tools: dict | None = None, **data: Any) -> tuple[Any, list[httpx.Request]]:
    """What an episode of a task comes to, and the requests at its endpoint, which are answered with a status."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(status, json=REPLY if status == 200 else REFUSAL)

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    harness.CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", http_client=client)
    task = SimpleNamespace(**{"system_prompt": None, "prompt": "1+1=?"} | data)
    given = (SimpleNamespace(model="policy"), "trace", "runtime", *ENDPOINT, tools or {}, task)
    return asyncio.run(harness.Chat().launch(*given, tool_interception_url="t")), asked


BEGUN = [SimpleNamespace(role="user"), SimpleNamespace(role="assistant")]


def test_a_task_without_tools_asks_once_in_this_process(harness: ModuleType) -> None:
    for task, messages in (
        ({"system_prompt": "Add."}, [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1=?"}]),
        ({"prompt": BEGUN}, [{"role": role, "content": "wired"} for role in ("user", "assistant")]),
    ):
        done, (request,) = launch(harness, **task)
        assert done == SimpleNamespace(exit_code=0, stdout="", stderr="")
        assert str(request.url) == "http://127.0.0.1:7/v1/chat/completions"
        assert request.headers["authorization"] == "Bearer secret"
        assert json.loads(request.content) == {"model": "policy", "messages": messages}
        assert [getattr(harness, name) for name in harness.__all__] == [harness.Chat], "verifiers finds one harness"


def test_a_refused_request_fails_and_a_task_with_tools_gets_the_program(harness: ModuleType) -> None:
    done, asked = launch(harness, status=400)
    assert (done.exit_code, len(asked)) == (1, 1)
    says(done.stderr, "400", "rollout stopped: enough")
    (given, named), asked = launch(harness, tools={"search": "http://127.0.0.1:8"})
    assert given[3:6] == (*ENDPOINT, {"search": "http://127.0.0.1:8"})
    assert (named, asked) == ({"tool_interception_url": "t"}, [])
