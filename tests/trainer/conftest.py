"""What tests here share: fake workers, since processes are slow to start, and handlers of signals."""

import signal
from collections.abc import Iterator

import pytest

from grpo_dist.workers.reward import RewardWorker
from tests.processes import spawned
from tests.trainer.fake_run import Groups
from tests.trainer.fakes import FakeActorWorker, FakePolicyWorker, FakeRolloutWorker


@pytest.fixture(scope="package")
def groups(local_ray: None) -> Iterator[Groups]:
    """2 actor ranks, 2 engines, 1 reference, 1 reward process."""
    with (
        spawned("actor", FakeActorWorker, [(0, 2), (1, 2)]) as actor,
        spawned("rollout", FakeRolloutWorker, [(), ()]) as rollout,
        spawned("ref", FakePolicyWorker, [(0, 1)]) as ref,
        spawned("reward", RewardWorker, [()]) as reward,
    ):
        yield {"actor": actor, "rollout": rollout, "ref": ref, "reward": reward}


@pytest.fixture
def handlers() -> Iterator[None]:
    """Signals to this process reach the run that is at work."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
