import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.targets import TargetSettings
from grpo_dist.errors import RewardError, WorkerLost
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.workers.batch_ref import DataProtoRef, Label
from grpo_dist.workers.group import Call, WorkerGroup, finished
from grpo_dist.workers.limits import TimeLimits
from grpo_dist.workers.probe import process_state
from grpo_dist.workers.process import Process
from grpo_dist.workers.restarts import RestartBudget
from grpo_dist.workers.reward import Task
from grpo_dist.workers.reward_pool import RewardPool
from tests.processes import spawned

pytestmark = pytest.mark.ray
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
                raise RewardError("the function's own mistake")
            os.kill(os.getpid(), signal.Signals[what])

    def score(self, group: DataProtoRef, task: Task) -> tuple[tuple, DataProto]:
        self._step_on_trap()
        data = DataProto.from_dict({"score": torch.arange(len(group)).float()})
        return (Label.of(data, ("score",)), [f"by {os.getpid()}"], ([], 0)), data

    def compute_targets(self, *args: object) -> tuple[tuple[Label, dict[str, float]], DataProto]:
        self._step_on_trap()
        data = DataProto.from_dict({"advantages": torch.ones(2)})
        return (Label.of(data, ()), {"pid": float(os.getpid())}), data

    def write_samples(self, batch: DataProtoRef, path: str, step: int, truths: dict) -> None:
        self._step_on_trap()
        Path(path).write_text(f"{step}")


@pytest.fixture
def make(local_ray: None, tmp_path: Path) -> Iterator[Callable[[int], RewardPool]]:
    with ExitStack() as processes:

        def make(most: int) -> RewardPool:
            pool = RewardPool(processes.enter_context(spawned("reward", Fragile, [()])), RestartBudget(most))
            pool.workers.gather(pool.submit_start(str(tmp_path / "trap")))  # type: ignore[arg-type]
            return pool

        yield make


def group() -> DataProtoRef:
    return DataProtoRef.put(DataProto.from_dict(dict(GROUP)), small=())


def score(pool: RewardPool) -> tuple[DataProtoRef, list[str]]:
    """As the pump does."""
    while True:
        call = pool.submit(group(), Task("", "", {})) if pool.has_free else pool.starting[0]
        found = pool.collect(wait(call))
        if found is not None:
            return found


def wait(call: Call) -> Call:
    while not finished([call], None):
        pass
    return call


def test_a_process_that_dies_is_replaced_and_its_data_outlives_it(make: Callable, tmp_path: Path) -> None:
    pool = make(1)
    first, (by_first,) = score(pool)
    (tmp_path / "trap").write_text("SIGKILL")
    second, (by_second,) = score(pool)
    assert by_first != by_second
    assert "reward worker 0" in pool.restarts.failures[0]
    for handle in (first, second):
        assert handle.fetch(("score",))["score"].tolist() == [0.0, 1.0]
    (tmp_path / "trap").write_text("SIGKILL")
    with pytest.raises(WorkerLost, match="stage 'score': its process died"):
        score(pool)


def test_a_process_that_hangs_is_replaced_once(make: Callable, tmp_path: Path) -> None:
    """The late call is asked again; what else it was asked for does not count as another loss."""
    pool = make(1)
    (tmp_path / "trap").write_text("SIGSTOP")
    call = pool.submit(group(), Task("", "", {}))
    other = pool.workers.submit(0, "score", "score", group(), Task("", "", {}))
    while process_state(pool.workers.addresses[0].pid) != "stopped":
        time.sleep(0.05)
    pool.replace(call, call.group.late([call], 0.1))
    pool.replace(other, WorkerLost("gone too"))
    assert "no answer within 0.1 s: its process is stopped" in pool.restarts.failures[0]
    assert len(pool.restarts.failures) == 1
    assert score(pool)[0]["score"].tolist() == [0, 1]


def test_an_answer_that_is_taken_in_after_its_process_is_gone_counts_and_frees_nobody(make: Callable) -> None:
    """A whole batch asked of the same process has shown that it is gone."""
    pool = make(1)
    call = wait(pool.submit(group(), Task("", "", {})))
    pool.replace(call, WorkerLost("gone"))
    assert pool.collect(call)[0]["score"].tolist() == [0, 1]
    assert not pool.has_free, "its new process starts"
    pool.collect(wait(pool.starting[0]))
    pool.submit(group(), Task("", "", {}))
    assert not pool.has_free, "one process, one group at a time"


def test_whole_batches_are_asked_again(make: Callable, tmp_path: Path) -> None:
    pool = make(2)
    batch = DataProtoRef(small={"uid": np.array(["a", "b"])}, num_rows=2)
    columns = ("uid", "token_level_scores", "response_mask", "rollout_log_probs", "old_log_probs")
    data = DataProto.from_dict({name: torch.zeros(2) for name in (*columns, "prompts", "responses", "score")})
    batch = DataProtoRef.put(data, small=())
    (tmp_path / "trap").write_text("SIGKILL")
    targets, _ = pool.compute_targets(batch, TargetSettings("grpo"), 0.0, 0)
    assert targets.fetch(("advantages",))["advantages"].tolist() == [1, 1]
    (tmp_path / "trap").write_text("SIGKILL")
    pool.finish(pool.write_samples(batch, str(tmp_path / "7.jsonl"), 7, {}))
    assert (tmp_path / "7.jsonl").read_text() == "7"
    assert len(pool.restarts.failures) == 2


def test_the_functions_own_mistake_is_shown_at_once(make: Callable, tmp_path: Path) -> None:
    pool = make(3)
    (tmp_path / "trap").write_text("raise")
    with pytest.raises(RewardError, match="the function's own mistake"):
        score(pool)
    assert not pool.restarts.failures


def test_what_the_reward_function_prints_is_told_once_and_not_at_length() -> None:
    pool = RewardPool(WorkerGroup("reward", [None, None], TimeLimits(1.0)))
    for number in range(2):
        answer = "label", [], ([f"line {number}"] * 7, 100)
        call = SimpleNamespace(
            rank=number, process=None, result=lambda answer=answer: answer, handle=lambda label: label
        )
        assert pool.collect(call) == ("label", [])  # type: ignore[arg-type]
    assert pool.take_printed() == ["line 0"] * 7 + ["line 1"] * 3 + ["... and 204 more lines"]
    assert pool.take_printed() == []
