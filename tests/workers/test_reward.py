import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_dist.algorithms.settings import TargetSettings
from grpo_dist.errors import RewardError, WorkerLost
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.runtime.process import Process
from grpo_dist.supervisor import process_state
from grpo_dist.workers.reward import RewardPool
from grpo_dist.workers.scorer import Task
from tests.messages import refuses, says
from tests.processes import spawned

pytestmark = pytest.mark.ray
TASK = Task("", "", {})
GROUP = {name: Ragged.from_rows([[5], [6]], torch.int32) for name in ("responses", "response_mask")}


class Fragile(Process):
    """Scores rows by their positions. The first process to see a file does what it says, and removes it."""

    def start(self, trap: str) -> None:
        self.trap = Path(trap)

    def _step_on_trap(self) -> None:
        if self.trap.exists():
            what = self.trap.read_text()
            self.trap.unlink()
            if what == "raise":
                raise RewardError("own.py, line 7: mistake")
            os.kill(os.getpid(), signal.Signals[what])

    def score(self, batch: DataProtoRef, sizes: Sequence[int], tasks: Sequence[Task]) -> tuple[tuple, DataProto]:
        self._step_on_trap()
        while self.trap.with_name("hold").exists():
            time.sleep(0.01)
        parts = [DataProto.from_dict({"score": torch.arange(size).float()}) for size in sizes]
        found = [(Label.of(part), [f"by {os.getpid()}"]) for part in parts]
        return (found, ([], 0), 0.001), DataProto.concat(parts)

    def compute_targets(self, *args: object) -> tuple[tuple[Label, dict[str, float], tuple], DataProto]:
        self._step_on_trap()
        data = DataProto.from_dict({"advantages": torch.ones(2)})
        return (Label.of(data), {"pid": float(os.getpid())}, (["a line"], 0)), data

    def write_samples(self, batch: DataProtoRef, path: str, step: int, truths: dict) -> None:
        self._step_on_trap()
        Path(path).write_text(f"{step}")


@pytest.fixture
def make(local_ray: None, tmp_path: Path) -> Iterator[Callable[[int], RewardPool]]:
    with ExitStack() as processes:

        def make(most: int, size: int = 1) -> RewardPool:
            workers = processes.enter_context(spawned("reward", Fragile, [()] * size))
            pool = RewardPool(workers, RestartBudget(most))
            run(pool.start([str(tmp_path / "trap")] * size))
            return pool

        yield make


def group() -> DataProtoRef:
    return DataProtoRef.put(DataProto.from_dict(dict(GROUP)))


def scored_batch() -> DataProtoRef:
    """With all columns that targets and samples are made of."""
    columns = ["uid", "token_level_scores", "response_mask", "rollout_log_probs", "old_log_probs"]
    columns += ["prompts", "responses", "score", "failure", "said"]
    return DataProtoRef.put(DataProto.from_dict({name: torch.zeros(2) for name in columns}))


def score(pool: RewardPool, limit_s: float = 240.0) -> tuple[DataProtoRef, list[str]]:
    return run(pool.score(group(), TASK, limit_s))


def test_a_process_that_dies_is_replaced_and_its_data_outlives_it(make: Callable, tmp_path: Path) -> None:
    pool = make(1)
    first, (by_first,) = score(pool)
    (tmp_path / "trap").write_text("SIGKILL")
    second, (by_second,) = score(pool)
    assert by_first != by_second
    says(pool.restarts.failures[0], "reward worker 0", "'score'", "died")
    for handle in (first, second):
        assert handle.fetch(("score",))["score"].tolist() == [0.0, 1.0]
    (tmp_path / "trap").write_text("SIGKILL")
    with refuses(WorkerLost, "reward worker 0", "'score'", "died"):
        score(pool)


@pytest.mark.deep
def test_a_process_that_hangs_is_replaced_once(make: Callable, tmp_path: Path) -> None:
    """What else it was asked for is asked again too, and does not count as another loss."""
    pool = make(1)
    (tmp_path / "trap").write_text("SIGSTOP")
    batch = scored_batch()

    async def both() -> list[Any]:
        scoring = asyncio.create_task(pool.score(group(), TASK, 8.0))
        while process_state(pool.workers.addresses[0].pid) != "stopped":
            await asyncio.sleep(0.05)
        return list(await asyncio.gather(scoring, pool.compute_targets(batch, TargetSettings("grpo"), 0.0, 0)))

    run(pool.workers.call_home())
    (scores, _), (targets, _) = run(both())
    assert scores["score"].tolist() == [0, 1]
    assert targets.fetch(("advantages",))["advantages"].tolist() == [1, 1]
    says(pool.restarts.failures[0], "reward worker 0", "'score'", "8 s", "stopped")
    assert len(pool.restarts.failures) == 1


@pytest.mark.deep
def test_each_process_has_one_call_at_a_time_and_a_cancelled_one_keeps_its_process_busy(
    make: Callable, tmp_path: Path
) -> None:
    """The process is at work on it until it answers, whether anybody wants that or not."""
    pool, sent = make(0, size=2), []
    (tmp_path / "hold").touch()
    submit = pool.workers.submit_for_data
    pool.workers.submit_for_data = lambda *args, **kw: sent.append(submit(*args, **kw)) or sent[-1]  # type: ignore[method-assign]

    async def scenario() -> None:
        tasks = [asyncio.create_task(pool.score(group(), TASK, 240.0)) for _ in range(4)]
        while len(sent) < 2:
            await asyncio.sleep(0)
        assert sorted(call.rank for call in sent) == [0, 1]
        tasks[0].cancel()
        tasks[2].cancel()
        await asyncio.gather(tasks[0], tasks[2], return_exceptions=True)
        assert len(sent) == 2, "nobody has answered yet"
        (tmp_path / "hold").unlink()
        assert [await tasks[i] for i in (1, 3)]
        assert len(sent) == 3, "one was cancelled before it was sent"
        while any(member.taken for member in pool.members):  # the cancelled one may be the last to be answered
            await asyncio.sleep(0.01)

    run(scenario())
    assert [member.taken for member in pool.members] == [0, 0]


@pytest.mark.deep
def test_whole_batches_are_asked_again_and_the_functions_own_mistake_is_shown_at_once(
    make: Callable, tmp_path: Path
) -> None:
    pool, batch = make(2), scored_batch()
    (tmp_path / "trap").write_text("raise")
    with refuses(RewardError, "own.py, line 7"):
        score(pool)
    assert not pool.restarts.failures
    (tmp_path / "trap").write_text("SIGKILL")
    targets, _ = run(pool.compute_targets(batch, TargetSettings("grpo"), 0.0, 0))
    assert pool.printed.take() == ["the advantage or KL estimator printed:\n  a line"]
    assert targets.fetch(("advantages",))["advantages"].tolist() == [1, 1]

    async def write() -> None:
        await pool.write_samples(batch, str(tmp_path / "7.jsonl"), 7, {})

    (tmp_path / "trap").write_text("SIGKILL")
    run(write())
    assert (tmp_path / "7.jsonl").read_text() == "7"
    assert len(pool.restarts.failures) == 2
