"""The roles' typed methods, on processes that are none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.workers.batch_ref import DataProtoRef, Label
from grpo_dist.workers.gang import Gang, find_model
from grpo_dist.workers.group import Call, WorkerGroup
from grpo_dist.workers.limits import TimeLimits
from grpo_dist.workers.process import Address

pytestmark = pytest.mark.ray


class Handle:
    """As an actor's; what is asked of it has been answered when it is asked."""

    work = SimpleNamespace(remote=lambda: ray.put(None))

    @property
    def compute_log_probs(self) -> Any:
        def remote(rows: DataProtoRef) -> list[ray.ObjectRef]:
            data = DataProto.from_dict({"ref_log_probs": rows.fetch(("responses",))["responses"]})
            return [ray.put(Label.of(data, ())), ray.put(data)]

        return SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=remote))


def batch() -> DataProtoRef:
    columns = {name: Ragged.from_rows([[1], [2, 2], [3], [4, 4]], torch.int32) for name in ("prompts", "responses")}
    columns["response_mask"] = Ragged.from_rows([[1], [1, 1], [1], [1, 1]], torch.int8)
    lengths = {name: torch.tensor([1, 2, 1, 2]) for name in ("prompt_length", "response_length")}
    data = DataProto.from_dict(columns | lengths, {"uid": ["a", "a", "b", "b"]})
    return DataProtoRef.put(data, small=("uid", *lengths))


def test_after_a_pass_its_ranks_are_idle_and_busy_again_with_the_next_call(local_ray: None) -> None:
    workers = WorkerGroup("ref", [Handle(), Handle()], TimeLimits(60.0))
    group = Gang(workers)
    found = group.collect_log_probs(group.submit_log_probs("ref_log_prob", batch()))
    rows = found.fetch(("ref_log_probs",))["ref_log_probs"].rows()
    assert [row.tolist() for row in rows] == [[1], [2, 2], [3], [4, 4]]
    before = workers.busy_seconds()
    time.sleep(0.05)
    assert workers.busy_seconds() == before, "they are idle"
    workers.submit(0, "work", "work")
    time.sleep(0.1)
    assert workers.busy_seconds() >= before + 0.1


class Placed(WorkerGroup):
    """Processes that are none, on the nodes of these names; `asked` notes who is told to find the model."""

    def __init__(self, role: str, nodes: str, asked: list[tuple[str, int, str]]) -> None:
        super().__init__(role, [object() for _ in nodes], TimeLimits(60.0))
        self.nodes, self.asked = nodes, asked

    def call_home(self) -> list[Address]:
        return [Address(node, f"10.0.0.{node}", 1, node) for node in self.nodes]

    def submit(self, rank: int, stage: str, method: str, *args: Any, timed: bool = True) -> Call:
        assert (stage, method, args) == ("start", "find_model", ("Qwen/Qwen3-8B",))
        self.asked.append((self.role, rank, self.nodes[rank]))
        return Call(object(), self, rank, stage, 0.0)  # type: ignore[arg-type]

    def gather(self, calls: Sequence[Call], timeout_s: float | None = None) -> list[Any]:
        self.asked.append(("waited for", len(calls), ""))
        return []


def test_one_process_of_each_node_finds_the_model() -> None:
    asked: list[tuple[str, int, str]] = []
    groups = [Placed(role, nodes, asked) for role, nodes in (("rollout", "22"), ("actor", "1122"), ("reward", "13"))]
    find_model(groups, "Qwen/Qwen3-8B")
    assert asked == [("rollout", 0, "2"), ("actor", 0, "1"), ("reward", 1, "3"), ("waited for", 3, "")]
