"""Worker groups with real processes: values, errors, deaths and hangs."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import ray

from grpo_dist.errors import ConfigError, GrpoDistError, OutOfMemory, RewardError, WorkerError, WorkerLost
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.event_loop import TimeLimits
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.process import Address, Process
from tests.messages import refuses, says
from tests.processes import reserved

pytestmark = pytest.mark.ray


def worker_class() -> type:  # noqa: C901 - it counts the methods
    """A class of its own per call: Ray then sends it by value, and workers start without importing this module."""

    class Worker(Process):
        def __init__(self, rank: int) -> None:
            if rank < 0:
                raise ConfigError(f"rank {rank} cannot be built")
            self.rank = rank

        def add(self, number: int, delay: float = 0.0) -> int:
            time.sleep(delay)
            return 100 * self.rank + number

        def wait_for(self, path: str) -> int:
            while not os.path.exists(path):
                time.sleep(0.01)
            return self.rank

        def environment(self, name: str) -> str | None:
            return os.environ.get(name)

        def fail_as_ours(self) -> None:
            raise RewardError("the scorer returned None")

        def fill_the_gpu(self) -> None:
            from grpo_dist.engines.settings import PassLimits
            from grpo_dist.engines.train.memory_errors import smaller_passes, within_memory

            with smaller_passes(PassLimits("actor_rollout_ref.actor.ppo_", 8)), within_memory("a pass"):
                import torch

                raise torch.OutOfMemoryError("CUDA out of memory.")

        def fail(self) -> int:
            return {}["the key"]

        def fail_oddly(self) -> None:
            class OddError(Exception):
                def __init__(self, code: int, text: str) -> None:
                    super().__init__(f"{text} {code}")

            raise OddError(7, "odd")

        def exit(self) -> None:
            os._exit(3)

    return Worker


@pytest.fixture(scope="module")
def bundles(local_ray: None) -> Iterator[Mapping[str, list]]:
    with reserved(lasting=2, dying=3, unbuilt=1) as found:
        yield found


def spawn(bundles: list, args: list[tuple]) -> WorkerGroup:
    limits = TimeLimits(240.0)
    group = WorkerGroup.spawn("actor", worker_class(), bundles, args=args, env={"COLOUR": "blue"}, limits=limits)
    here = ray.get_runtime_context().get_node_id()
    group.note_addresses([Address(f"node{rank}", "127.0.0.1", os.getpid(), here) for rank in range(len(args))])
    return group


@pytest.fixture(scope="module")
def group(bundles: Mapping[str, list]) -> Iterator[WorkerGroup]:
    group = spawn(bundles["lasting"], [(0,), (1,)])
    yield group
    group.kill()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """What `Worker.wait_for` waits for: there when a test says so, or at its end."""
    yield tmp_path / "open"
    (tmp_path / "open").touch()


def is_answered(call: Call) -> bool:
    return bool(ray.wait([call.ref], timeout=0)[0])


def test_values_come_in_rank_order_from_processes_of_their_own_with_the_given_environment(group: WorkerGroup) -> None:
    assert group.call_all("add", "add", 5) == [5, 105]
    late = [group.submit(0, "add", "add", 1, 0.3), group.submit(1, "add", "add", 2)]
    assert group.gather(late) == [1, 102], "rank 0 answers last and stays first"
    assert group.call(1, "add", "add", 7) == 107
    calls = [group.submit(1, "add", "add", 1), group.submit(0, "add", "add", 2), group.submit(1, "add", "add", 3)]
    assert group.gather(calls) == [101, 2, 103]
    assert group.gather([]) == []
    assert len({os.getpid(), *(address.pid for address in group.call_all("pid", "address"))}) == 3
    assert group.call_all("environment", "environment", "COLOUR") == ["blue", "blue"]


# --- errors ------------------------------
def test_an_error_of_ours_comes_out_as_itself(group: WorkerGroup) -> None:
    with pytest.raises(RewardError) as caught:
        group.call_all("score", "fail_as_ours")
    assert (type(caught.value), str(caught.value)) == (RewardError, "the scorer returned None")


@pytest.mark.deep
def test_a_gpu_that_is_full_is_told_with_role_rank_node_and_key(group: WorkerGroup) -> None:
    with pytest.raises(OutOfMemory) as caught:
        group.call(1, "update", "fill_the_gpu")
    error = caught.value
    assert (error.role, error.rank, error.node, error.stage) == ("actor", 1, "node1", "update")
    assert error.setting == ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 8)
    remedy = "lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"
    says(error, "actor worker 1", "node1", "'update'", "memory", "GPU", remedy)


def test_any_other_error_names_the_worker_and_does_not_wait_for_its_peers(group: WorkerGroup, gate: Path) -> None:
    """`settle` does, and gives failures as values."""
    waiting = group.submit(0, "add", "wait_for", str(gate))
    with pytest.raises(WorkerError) as caught:
        group.gather([waiting, group.submit(1, "update", "fail")])
    assert not is_answered(waiting)
    error = caught.value
    assert not isinstance(error, WorkerLost), "nor blame one that works"
    assert (error.role, error.rank, error.node, error.stage) == ("actor", 1, "node1", "update")
    assert error.message == "KeyError: 'the key'"
    assert "test_group.py" in error.remote_traceback
    assert "in fail" in error.remote_traceback
    says(error, "actor worker 1", "node1", "'update'", "KeyError: 'the key'")
    gate.touch()
    failure, value = group.settle([group.submit(1, "fail", "fail"), waiting])
    assert (type(failure), failure.rank, value) == (WorkerError, 1, 0)


@pytest.mark.deep
def test_an_error_that_cannot_be_unpickled_is_still_told(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        group.call(0, "update", "fail_oddly")
    assert caught.value.message.endswith("OddError: odd 7")
    assert "in fail_oddly" in caught.value.remote_traceback
    assert group.call(0, "add", "add", 1) == 1, "the worker goes on"
    with pytest.raises(AttributeError):
        group.call(0, "x", "no_such_method")


# --- death ------------------------------
@pytest.mark.deep
def test_a_dead_process_is_told_while_others_hang(bundles: Mapping[str, list], gate: Path) -> None:
    group = spawn(bundles["dying"], [(0,), (1,), (2,)])
    try:
        victim = group.call_all("pid", "address")[2].pid
        start = time.monotonic()
        hanging = [group.submit(rank, "update", "wait_for", str(gate)) for rank in (0, 2)]
        with refuses(WorkerError, "actor worker 1", "node1", "'update'", "died") as caught:
            group.gather([*hanging, group.submit(1, "update", "exit")])
        assert not any(is_answered(call) for call in hanging)
        assert (caught.value.rank, caught.value.node) == (1, "node1")
        os.kill(victim, 9)
        with refuses(WorkerError, "actor worker 2", "node2", "'add'", "died"):
            group.call(2, "add", "add", 1)
        assert time.monotonic() - start < 120, "half their limit"
    finally:
        group.kill()
    with refuses(WorkerError, "actor worker 0", "node0", "'add'", "died"):
        group.call(0, "add", "add", 1)


def test_a_worker_that_cannot_be_built_says_why(bundles: Mapping[str, list]) -> None:
    group = spawn(bundles["unbuilt"], [(-1,)])
    with refuses(GrpoDistError, "actor worker 0", "'start'", "rank -1"):
        group.call(0, "start", "address")
    group.kill()
