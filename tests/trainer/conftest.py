"""Fake workers for all tests here: processes are slow to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from grpo_dist.roles.reward import RewardWorker
from grpo_dist.runtime.group import WorkerGroup
from tests.processes import spawned
from tests.trainer.fakes import FakeActorWorker, FakePolicyWorker, FakeRolloutWorker


@pytest.fixture(scope="package")
def groups(local_ray: None) -> Iterator[dict[str, WorkerGroup]]:
    """2 actor ranks, 2 engines, 1 reference, 1 reward process."""
    with (
        spawned("actor", FakeActorWorker, [(0, 2), (1, 2)]) as actor,
        spawned("rollout", FakeRolloutWorker, [(), ()]) as rollout,
        spawned("ref", FakePolicyWorker, [(0, 1)]) as ref,
        spawned("reward", RewardWorker, [()]) as reward,
    ):
        yield {"actor": actor, "rollout": rollout, "ref": ref, "reward": reward}
