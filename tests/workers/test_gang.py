"""The roles' typed methods, on processes that are none."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import TrainingDiverged, WorkerLost
from grpo_dist.protocol import DataProto, Mean, Ragged, Sum, metric_values
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.event_loop import TimeLimits, run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.runtime.process import Address, Process
from grpo_dist.trainer.rollout.job import RolloutJob
from grpo_dist.trainer.rollout.pump import RolloutPump
from grpo_dist.workers.actor import ActorGroup
from grpo_dist.workers.gang import Gang, ReferenceGroup, Turn, find_model
from grpo_dist.workers.reward import RewardPool
from grpo_dist.workers.rollout import GroupRequest, RolloutGroup
from grpo_dist.workers.scorer import Task
from tests.processes import spawned

pytestmark = pytest.mark.ray


# All that a group itself reads of a worker's settings.
SETTINGS = SimpleNamespace(model=SimpleNamespace(sequence_parallel_size=1))


class Handle:
    """As an actor's; what is asked of it has been answered when it is asked."""

    work = SimpleNamespace(remote=lambda: ray.put(None))

    @property
    def compute_log_probs(self) -> Any:
        def remote(rows: DataProtoRef) -> list[ray.ObjectRef]:
            data = DataProto.from_dict({"ref_log_probs": rows.fetch(("responses",))["responses"]})
            return [ray.put(Label.of(data)), ray.put(data)]

        return SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=remote))


def batch() -> DataProtoRef:
    columns = {name: Ragged.from_rows([[1], [2, 2], [3], [4, 4]], torch.int32) for name in ("prompts", "responses")}
    columns["response_mask"] = Ragged.from_rows([[1], [1, 1], [1], [1, 1]], torch.int8)
    lengths = {name: torch.tensor([1, 2, 1, 2]) for name in ("prompt_length", "response_length")}
    data = DataProto.from_dict(columns | lengths, {"uid": ["a", "a", "b", "b"]})
    return DataProtoRef.put(data)


@pytest.mark.deep
def test_after_a_pass_its_ranks_are_idle_and_busy_again_with_the_next_call(local_ray: None) -> None:
    workers = WorkerGroup("ref", [Handle(), Handle()], TimeLimits(60.0))
    group = Gang(workers)
    found = run(group.compute_log_probs("ref_log_prob", batch()))
    rows = found.fetch(("ref_log_probs",))["ref_log_probs"].rows()
    assert [row.tolist() for row in rows] == [[1], [2, 2], [3], [4, 4]]
    before = workers.busy_seconds()
    time.sleep(0.05)
    assert workers.busy_seconds() == before, "they are idle"
    workers.submit(0, "work", "work")
    time.sleep(0.1)
    assert workers.busy_seconds() >= before + 0.1


# --- ranks that split sequences ----------------------------------------------------------------------------------
class Splitting(Handle):
    """As an actor's rank of a group of two: it notes its rows, and returns its rank as their log-probs and loss."""

    def __init__(self, rank: int, seen: dict[int, Any]) -> None:
        self.rank, self.seen = rank, seen

    def _result(self, rows: DataProtoRef) -> DataProto:
        lengths = rows.fetch(("responses",))["responses"].lengths.tolist() if len(rows) else []
        return DataProto.from_dict(
            {"old_log_probs": Ragged.from_rows([[float(self.rank)] * n for n in lengths], torch.float32)}
        )

    @property
    def compute_log_probs(self) -> Any:
        def remote(rows: DataProtoRef) -> list[ray.ObjectRef]:
            self.seen[self.rank] = rows["uid"].tolist()
            data = self._result(rows)
            return [ray.put(Label.of(data)), ray.put(data)]

        return SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=remote))

    @property
    def update(self) -> Any:
        def remote(rows: DataProtoRef, mini_batches: Any, objective: Any, step: int) -> list[ray.ObjectRef]:
            self.seen[self.rank] = [rows["uid"][part].tolist() for part in mini_batches]
            data, metrics = self._result(rows), {"actor/loss": Sum(1.0), "actor/entropy": Mean(10.0 * self.rank, 2)}
            return [ray.put(([metrics], Label.of(data))), ray.put(data)]

        return SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=remote))


@pytest.fixture
def splitting(local_ray: None) -> tuple[ActorGroup, dict[int, Any]]:
    """Four ranks, of which the first two and the last two split the same sequences."""
    seen: dict[int, Any] = {}
    group = ActorGroup(WorkerGroup("actor", [Splitting(rank, seen) for rank in range(4)], TimeLimits(60.0)))
    group._settings = SimpleNamespace(model=SimpleNamespace(sequence_parallel_size=2))  # type: ignore[assignment]
    return group, seen


@pytest.mark.deep
def test_ranks_that_split_sequences_have_the_same_rows_and_one_answers(splitting: Any) -> None:
    group, seen = splitting
    rows = run(group.compute_log_probs("old_log_prob", batch())).fetch(("old_log_probs",))["old_log_probs"].rows()
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert sorted([*seen[0], *seen[2]]) == ["a", "a", "b", "b"], "each row is in one group"
    assert [row.tolist() for row in rows] in ([[0], [0, 0], [2], [2, 2]], [[2], [2, 2], [0], [0, 0]])


@pytest.mark.deep
def test_rows_of_ranks_that_split_sequences_are_counted_once(splitting: Any) -> None:
    group, seen = splitting
    updated, metrics = run(group.update(batch(), [np.arange(4)], None, 1))
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert len(seen[0][0]) == len(seen[2][0]) == 2
    assert metric_values(metrics) == {"actor/loss": 2.0, "actor/entropy": 20 / 4}, "of ranks 0 and 2"
    rows = updated.fetch(("old_log_probs",))["old_log_probs"].rows()
    assert [row.tolist() for row in rows] in ([[0], [0, 0], [2], [2, 2]], [[2], [2, 2], [0], [0, 0]])


class Placed(WorkerGroup):
    """Processes that are none, on the nodes of these names; `asked` notes who is told to find the model."""

    def __init__(self, role: str, nodes: str, asked: list[tuple[str, int, str]]) -> None:
        super().__init__(role, [object() for _ in nodes], TimeLimits(60.0))
        self.nodes, self.asked = nodes, asked

    async def call_home(self) -> list[Address]:
        return [Address(node, f"10.0.0.{node}", 1, node) for node in self.nodes]

    def submit(self, rank: int, stage: str, method: str, *args: Any) -> Call:
        assert (stage, method, args) == ("start", "find_model", ("Qwen/Qwen3-8B", "model.path"))
        self.asked.append((self.role, rank, self.nodes[rank]))
        return Call(object(), self, rank, stage, time.monotonic(), 60.0)  # type: ignore[arg-type]

    async def value(self, call: Call) -> None:
        self.asked.append(("has found it", call.rank, self.nodes[call.rank]))


@pytest.mark.deep
def test_one_process_of_each_node_finds_the_model() -> None:
    asked: list[tuple[str, int, str]] = []
    groups = [Placed(role, nodes, asked) for role, nodes in (("rollout", "22"), ("actor", "1122"), ("reward", "13"))]
    run(find_model(groups, "Qwen/Qwen3-8B", "model.path"))
    assert asked[:3] == [("rollout", 0, "2"), ("actor", 0, "1"), ("reward", 1, "3")]
    assert sorted(node for what, _, node in asked[3:] if what == "has found it") == ["1", "2", "3"]


# --- a rank that is lost -----------------------------------------------------------------------------------------
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
        assert self.settings == SETTINGS, "it was started"
        if self.trap is not None:
            os.kill(os.getpid(), self.trap)
        data = rows.fetch(("uid", "responses"))
        values = [[float(uid)] * n for uid, n in zip(data["uid"], data["responses"].lengths.tolist(), strict=True)]
        found = DataProto.from_dict({"ref_log_probs": Ragged.from_rows(values, torch.float32)})
        return Label.of(found), found


@pytest.fixture
def reference(local_ray: None) -> Iterator[ReferenceGroup]:
    with spawned("ref", Reference, [(0,), (1,)]) as workers:
        group = ReferenceGroup(workers, RestartBudget(1))
        run(group.start(SETTINGS))  # type: ignore[arg-type]
        yield group


def groups_of(count: int) -> list[DataProtoRef]:
    """Groups "0", "1", ... of two responses, of two tokens and of one."""
    groups = []
    for i in range(count):
        columns = {name: Ragged.from_rows([[5, 6], [7]], torch.int32) for name in ("prompts", "responses")}
        columns["response_mask"] = Ragged.from_rows([[1, 1], [1]], torch.int8)
        lengths = {name: torch.tensor([2, 1]) for name in ("prompt_length", "response_length")}
        data = DataProto.from_dict(columns | lengths, {"uid": [f"{i}"] * 2})
        groups.append(DataProtoRef.put(data))
    return groups


def log_probs(reference: ReferenceGroup, groups: Sequence[DataProtoRef]) -> list[list[float]]:
    found = run(reference.compute_log_probs("ref_log_prob", DataProtoRef.concat(groups)))
    return [row.tolist() for row in found.fetch(("ref_log_probs",))["ref_log_probs"].rows()]


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_pass_whose_rank_is_lost_is_done_again(reference: ReferenceGroup, number: signal.Signals) -> None:
    """The other rank has answered, and is replaced with it; a second loss is beyond the budget."""
    before = list(reference.workers.handles)
    reference.workers.call(1, "test", "set_trap", number)
    reference.workers.limits = TimeLimits(60.0, {"ref_log_prob": 60.0 if number == signal.SIGKILL else 8.0})
    assert log_probs(reference, groups_of(2)) == [[0, 0], [0], [1, 1], [1]]
    assert not set(before) & set(reference.workers.handles)
    assert "ref worker 1" in reference.restarts.failures[0]
    reference.workers.call(0, "test", "set_trap", signal.SIGKILL)
    with pytest.raises(WorkerLost, match="ref worker 0"):
        log_probs(reference, groups_of(2))


def test_only_a_loss_is_made_good(reference: ReferenceGroup) -> None:
    with pytest.raises(TrainingDiverged, match="nan"):
        run(reference.restart(TrainingDiverged("nan")))
    run(reference.load_checkpoint("folder"))
    with pytest.raises(WorkerLost, match="gone"):  # its weights are those of a checkpoint
        run(reference.restart(WorkerLost("gone")))
    with pytest.raises(WorkerLost, match="gone"):  # the policy: only a checkpoint has it
        run(ActorGroup(reference.workers).restart(WorkerLost("gone")))
    assert not reference.restarts.failures


@pytest.mark.deep
def test_ranks_that_are_lost_together_cost_one_restart_and_other_passes_wait(reference: ReferenceGroup) -> None:
    """Four passes of a job of which all groups are there; none of them is lost."""
    engines, scorers = (WorkerGroup(role, [None], TimeLimits(60.0)) for role in ("rollout", "reward"))
    source = functools.partial(reference.compute_log_probs, "ref_log_prob")
    pump = RolloutPump(RolloutGroup(engines), RewardPool(scorers), {"ref": source}, reward_timeout_s=60.0)
    reference.workers.call_all("test", "set_trap", signal.SIGKILL)
    groups = groups_of(5)
    sampling, task = SamplingSettings(2, 1.0, 1.0, -1, 4, None), Task("", "", {})
    requests = [GroupRequest(f"{i}", np.array([3], np.int32), sampling, task) for i in range(5)]

    async def sample() -> RolloutJob:
        finished = {i: (group, group) for i, group in enumerate(groups)}
        job = pump.submit(requests, sources=("ref",), finished=finished)
        await job.finished()
        return job

    found = {i: ref.fetch(("ref_log_probs",))["ref_log_probs"] for i, ref in run(sample()).log_probs["ref"].items()}
    assert {i: [row.tolist() for row in column.rows()] for i, column in found.items()} == {
        i: [[i, i], [i]] for i in range(5)
    }
    assert len(reference.restarts.failures) == 1


class Busy(Gang):
    """A gang that writes down when its ranks compute."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__(SimpleNamespace(role=name))  # type: ignore[arg-type]
        self.name, self.events = name, events

    def _parts(self, batch: Any, columns: Sequence[str]) -> Any:
        return [], []

    async def _ask(self, send: Any) -> Any:
        self.events.append(f"{self.name} begins")
        await asyncio.sleep(0)
        self.events.append(f"{self.name} ends")
        raise TimeoutError  # what comes after does not matter here


async def test_engines_make_room_for_a_gang_that_is_to_be_alone() -> None:
    asked: list[str] = []

    async def make_room() -> None:
        asked.append("sleep")

    turn = Turn(make_room)
    async with turn.beside_engines:
        assert asked == []
    async with turn.alone():
        assert (asked, turn.beside_engines.locked()) == (["sleep"], True)


@pytest.mark.parametrize("share", [True, False])
async def test_gangs_on_the_same_gpus_take_turns(share: bool) -> None:
    events: list[str] = []
    gangs = [Busy(name, events) for name in ("actor", "ref")]
    if share:
        gangs[0].turn = gangs[1].turn
    passes = (gang.compute_log_probs("ref_log_prob", DataProtoRef()) for gang in gangs)
    await asyncio.gather(*passes, return_exceptions=True)
    in_turns = ["actor begins", "actor ends", "ref begins", "ref ends"]
    assert (events == in_turns) == share
    assert sorted(events) == sorted(in_turns)
