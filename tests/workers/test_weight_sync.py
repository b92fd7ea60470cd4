"""The order and the bookkeeping of a weight sync, with workers that write down what they are asked.

The weights themselves are checked against Hugging Face in tests/engines/vllm/test_engine.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from grpo_dist.errors import GrpoDistError, WorkerError
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.workers.rollout import RolloutGroup
from grpo_dist.workers.weight_transport import ObjectStoreTransport
from tests.messages import refuses
from tests.processes import spawned

pytestmark = pytest.mark.ray


def worker_class() -> type:
    """A class of its own: Ray sends it by value, so workers start fast."""

    class Worker:
        def __init__(self, rank: int) -> None:
            self.rank = rank
            self.log: list = []
            self.answer: object = None

        def behave(self, answer: object) -> None:
            self.answer, self.log = answer, []

        def calls(self) -> list:
            return self.log

        def export_weights(self, dtype: str) -> list:
            import ray

            started = time.monotonic()
            if self.answer == "fail":
                raise RuntimeError("gather failed")
            time.sleep(0.2 * self.rank)
            self.log.append(("export", dtype, started, time.monotonic()))
            return [ray.put(f"bucket {i} in {dtype}") for i in range(2)] if self.rank == 0 else []

        def load_weights(self, buckets: list, version: int) -> object:
            import ray

            self.log.append(("load", ray.get(buckets), version, time.monotonic()))
            return version if self.answer is None else self.answer

    return Worker


@pytest.fixture(scope="module")
def groups(local_ray: None) -> Iterator[tuple[WorkerGroup, RolloutGroup]]:
    ranks: list[tuple] = [(0,), (1,)]
    with spawned("actor", worker_class(), ranks) as actor, spawned("rollout", worker_class(), ranks) as rollout:
        yield actor, RolloutGroup(rollout)


@pytest.fixture(autouse=True)
def _fresh(groups: tuple[WorkerGroup, RolloutGroup]) -> None:
    for workers in (groups[0], groups[1].workers):
        workers.call_all("behave", "behave", None)


def test_every_engine_loads_rank_0s_buckets_once_all_ranks_have_exported(groups: tuple) -> None:
    actor, rollout = groups
    run(rollout.sync_weights(actor, ObjectStoreTransport(), version=4, dtype="float32"))
    exports = [log for (log,) in actor.call_all("calls", "calls")]
    loads = [log for (log,) in rollout.workers.call_all("calls", "calls")]
    assert [log[:2] for log in exports] == [("export", "float32")] * 2, "once per rank, in the engines' type"
    assert [log[:3] for log in loads] == [("load", ["bucket 0 in float32", "bucket 1 in float32"], 4)] * 2
    assert max(log[3] for log in exports) < min(log[3] for log in loads)


def test_versions_follow_one_another(groups: tuple) -> None:
    for version in (0, 1, 2):
        run(groups[1].sync_weights(groups[0], ObjectStoreTransport(), version=version, dtype="bfloat16"))
    assert [[log[2] for log in rank] for rank in groups[1].workers.call_all("calls", "calls")] == [[0, 1, 2]] * 2


@pytest.mark.parametrize("held", [3, -1, "4"])
def test_an_engine_that_confirms_another_version_stops_the_run(groups: tuple, held: object) -> None:
    actor, rollout = groups
    rollout.workers.call(1, "behave", "behave", held)
    with refuses(GrpoDistError, "rollout worker 1", f"version {held}", "sync of 4"):
        run(rollout.sync_weights(actor, ObjectStoreTransport(), version=4, dtype="float32"))


def test_no_engine_is_touched_when_the_export_fails(groups: tuple) -> None:
    actor, rollout = groups
    actor.call(1, "behave", "behave", "fail")
    with refuses(WorkerError, "actor worker 1", "'sync_weights'", "RuntimeError: gather failed"):
        run(rollout.sync_weights(actor, ObjectStoreTransport(), version=5, dtype="float32"))
    assert rollout.workers.call_all("calls", "calls") == [[], []]
