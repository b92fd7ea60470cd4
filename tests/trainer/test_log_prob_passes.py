import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch

from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import TrainingDiverged, WorkerLost
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.trainer.log_prob_passes import Giver, PassQueue
from grpo_dist.trainer.pump import RolloutPump
from grpo_dist.trainer.rollout_job import GroupRequest, LogProbPass, RolloutJob
from grpo_dist.workers.batch_ref import DataProtoRef, Label
from grpo_dist.workers.group import WorkerGroup, finished
from grpo_dist.workers.gang import ReferenceGroup
from grpo_dist.workers.limits import TimeLimits
from grpo_dist.workers.process import Process
from grpo_dist.workers.restarts import RestartBudget
from grpo_dist.workers.reward import Task
from grpo_dist.workers.reward_pool import RewardPool
from grpo_dist.workers.rollout_group import RolloutGroup
from tests.processes import spawned

pytestmark = pytest.mark.ray
SAMPLING = SamplingSettings(2, 1.0, 1.0, -1, 4, None)


class Reference(Process):
    """A rank of two; its log-probs are its row's uid and -1. On request it ends in the midst of a pass."""

    trap: signal.Signals | None = None

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def open_store(self, host: str) -> int:
        return 0

    def start(self, settings: Any, host: str, port: int) -> None:
        self.settings = settings

    def set_trap(self, number: int) -> None:
        self.trap = signal.Signals(number)

    def load_checkpoint(self, folder: str) -> None: ...

    def compute_log_probs(self, rows: DataProtoRef) -> tuple[Label, DataProto]:
        assert self.settings == "settings", "it was started"
        if self.trap is not None:
            os.kill(os.getpid(), self.trap)
        data = rows.fetch(("uid", "responses"))
        values = [[float(uid)] * n for uid, n in zip(data["uid"], data["responses"].lengths.tolist(), strict=True)]
        found = DataProto.from_dict({"ref_log_probs": Ragged.from_rows(values, torch.float32)})
        return Label.of(found, ()), found


def job_of(num_groups: int) -> RolloutJob:
    """All groups generated; two passes."""
    requests = [GroupRequest(f"{i}", np.array([3], np.int32), SAMPLING, Task("", "", {})) for i in range(num_groups)]
    passes = [LogProbPass(part.tolist()) for part in np.array_split(np.arange(num_groups), 2)]
    job = RolloutJob(requests, {"ref": passes}, log_probs={"ref": {}}, timings={"gen": 0.0})
    for i in range(num_groups):
        columns = {name: Ragged.from_rows([[5, 6], [7]], torch.int32) for name in ("prompts", "responses")}
        columns["response_mask"] = Ragged.from_rows([[1, 1], [1]], torch.int8)
        lengths = {name: torch.tensor([2, 1]) for name in ("prompt_length", "response_length")}
        data = DataProto.from_dict(columns | lengths, {"uid": [f"{i}"] * 2})
        job.groups[i] = DataProtoRef.put(data, small=("uid", *lengths))
    return job


def run(queue: PassQueue, job: RolloutJob) -> None:
    queue.queue.extend((job, part) for part in job.passes["ref"])
    while not job.done_passes:
        queue.dispatch()
        for call in finished(queue.in_flight, None, 0.1):
            queue.collect(call)
        queue.check_deadline()


@pytest.fixture
def reference(local_ray: None) -> Iterator[ReferenceGroup]:
    with spawned("ref", Reference, [(0,), (1,)]) as workers:
        group = ReferenceGroup(workers, RestartBudget(1))
        workers.gather(group.submit_start("settings"))  # type: ignore[arg-type]
        yield group


def values(job: RolloutJob) -> dict[int, list[list[float]]]:
    found = {i: ref.fetch(("ref_log_probs",))["ref_log_probs"] for i, ref in job.log_probs["ref"].items()}
    return {i: [row.tolist() for row in column.rows()] for i, column in sorted(found.items())}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_pass_whose_rank_is_lost_is_done_again(reference: ReferenceGroup, number: signal.Signals) -> None:
    """The other rank has answered, and is replaced with it; a second loss is beyond the budget."""
    queue = PassQueue("ref", Giver(lambda batch: reference.submit_log_probs("ref_log_prob", batch), reference.restart))
    before = list(reference.workers.handles)
    reference.workers.call(1, "test", "set_trap", number)
    job = job_of(4)
    reference.workers.limits = TimeLimits(60.0, {"ref_log_prob": 60.0 if number == signal.SIGKILL else 8.0})
    run(queue, job)
    assert values(job) == {i: [[i, i], [i]] for i in range(4)}
    assert not set(before) & set(reference.workers.handles)
    assert "ref worker 1" in reference.restarts.failures[0]
    reference.workers.call(0, "test", "set_trap", signal.SIGKILL)
    with pytest.raises(WorkerLost, match="ref worker 0"):
        run(queue, job_of(2))


def test_only_a_loss_is_made_good(reference: ReferenceGroup) -> None:
    with pytest.raises(TrainingDiverged, match="nan"):
        next(reference.restart(TrainingDiverged("nan")))
    reference.load_checkpoint("folder")
    with pytest.raises(WorkerLost, match="gone"):  # its weights are those of a checkpoint
        next(reference.restart(WorkerLost("gone")))
    with pytest.raises(WorkerLost, match="gone"):  # what cannot be replaced at all
        Giver(lambda batch: None).restart(WorkerLost("gone"))  # type: ignore[arg-type,return-value]
    assert not reference.restarts.failures


def test_ranks_that_are_lost_together_cost_one_restart(reference: ReferenceGroup) -> None:
    """Both calls are found done in one look: the second is nobody's by then, and of no engine either."""
    engines, scorers = (WorkerGroup(role, [None], TimeLimits(60.0)) for role in ("rollout", "reward"))
    giver = Giver(lambda batch: reference.submit_log_probs("ref_log_prob", batch), reference.restart)
    pump = RolloutPump(RolloutGroup(engines), RewardPool(scorers), {"ref": giver}, reward_timeout_s=60.0)
    reference.workers.call_all("test", "set_trap", signal.SIGKILL)
    made = job_of(4)
    there = {i: (group, group) for i, group in made.groups.items()}
    job = pump.submit(made.requests, givers=("ref",), there=there)
    ray.wait([call.ref for call in pump.in_flight], num_returns=2, timeout=60.0, fetch_local=False)
    pump.wait(lambda: job.done_passes)
    assert values(job) == {i: [[i, i], [i]] for i in range(4)}
    assert len(reference.restarts.failures) == 1
