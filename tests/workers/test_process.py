"""What a process knows of its node."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grpo_dist import assets
from grpo_dist.engines.base import MiniBatchResult
from grpo_dist.engines.settings import AgentSettings, SamplingSettings
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto, Sum
from grpo_dist.workers import process as process_module
from grpo_dist.workers.policy import ActorWorker
from grpo_dist.workers.process import Process
from grpo_dist.workers.rollout import RolloutWorker
from tests.agents.fakes import Characters, Writer
from tests.messages import refuses, says
from tests.models import objective, random_batch


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    monkeypatch.setattr(Process, "here", lambda self: "node gpu7 (10.0.0.7)")
    return Process()


def test_a_folder_of_the_node(process: Process, tmp_path: Path) -> None:
    assert process.find_model(str(tmp_path)) == str(tmp_path)
    assert Path(process.find_model("builtin:tiny-qwen3"), "config.json").is_file()


def test_a_folder_that_is_on_another_node(process: Process, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        process.find_model(str(tmp_path / "mine"))
    told = str(caught.value)
    says(told, "gpu7 (10.0.0.7)", f"actor_rollout_ref.model.path={tmp_path}/mine", "share")


def test_a_model_that_the_hub_does_not_give_to_a_node(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, key: str, *, weights: bool) -> str:
        raise ConfigError(f"{key}={name}: 401")

    monkeypatch.setattr(assets, "_from_hub", refuse)
    with refuses(ConfigError, "gpu7 (10.0.0.7)", "actor_rollout_ref.model.path=a/gated: 401"):
        process.find_model("a/gated")


def test_a_node_with_the_other_build(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "build_problem", lambda device: f"no {device} here")
    with refuses(ConfigError, "gpu7 (10.0.0.7)", "cuda here"):
        process.check_build("cuda")


# --- what custom code prints ---------------------------------------------------------------------------------------
class PrintingEngine:
    """Stands for a train engine whose loss prints."""

    def on_device(self, *, optimizer: bool) -> contextlib.AbstractContextManager[None]:
        print("not the loss")
        return contextlib.nullcontext()

    def train_mini_batch(self, data: DataProto, **options: object) -> MiniBatchResult:
        print("rows", len(data))
        return MiniBatchResult({"actor/loss": Sum(1.0)}, None)


def test_what_a_loss_prints_in_an_actor_is_kept() -> None:
    worker = ActorWorker.__new__(ActorWorker)
    model = SimpleNamespace(room="", sequence_parallel_size=1)
    settings: Any = SimpleNamespace(model=model, train_micro_batch_size=2, train_max_token_len=None)
    worker.settings, worker.engine = settings, PrintingEngine()  # type: ignore[assignment]
    data = random_batch(num_groups=1, n=4)
    rows: Any = SimpleNamespace(fetch=lambda columns: data)
    worker.update(rows, [np.array([0, 1, 2]), np.array([3])], objective(), 1)
    assert worker.take_printed() == (["rows 3", "rows 1"], 0)
    assert worker.take_printed() == ([], 0)


LOOP = """
from grpo_dist.agents import AgentLoop


class Chatty(AgentLoop):
    def __init__(self):
        print("made")

    async def run(self, episode):
        await episode.generate()
        print("said", episode.text)
"""


def test_what_an_agent_loop_prints_in_an_engine_is_kept(tmp_path: Path, random_models: dict[str, str]) -> None:
    (tmp_path / "chatty.py").write_text(LOOP)
    agent = AgentSettings(f"{tmp_path}/chatty.py:Chatty", {}, 30.0)
    worker, writer = RolloutWorker(), Writer("yes", "no")
    settings = SimpleNamespace(agent=agent, model_path=random_models["tied"], trust_remote_code=False, max_model_len=90)
    worker.engine = SimpleNamespace(settings=settings, generate=writer.generate, load=None)  # type: ignore[assignment]

    async def episodes() -> None:
        await worker._start_agent()
        worker.tokenizer = Characters()  # type: ignore[assignment]
        print("not the loop")
        await worker.generate("p", np.array([1, 2]), SamplingSettings(2, 1.0, 1.0, -1, 30, 5))
        assert worker.runner is not None
        await worker.runner.stop()

    asyncio.run(episodes())
    lines, more = worker.take_printed()
    assert (lines[0], sorted(lines[1:]), more) == ("made", ["said no", "said yes"], 0)
