"""Placement groups: on the tests' own cluster, and on several Ray nodes with GPUs that are none."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.util.placement_group import placement_group_table

from grpo_dist.errors import ConfigError
from grpo_dist.plan.placement import Seat, Slot, slots_of
from grpo_dist.runtime import resources
from grpo_dist.runtime.resources import release, reserve
from tests.messages import says

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
ROLES = ("actor", "rollout", "reward")
NEEDS = {"actor": (0.05, 0.0), "ref": (0.1, 0.0)}  # CPUs and GPUs of each process


def on_fake_machines(nodes: int, *overrides: str) -> dict[str, Any]:
    """What tests/runtime/fake_machines.py tells."""
    command = [sys.executable, "-m", "tests.runtime.fake_machines", str(nodes), *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"')))


@pytest.mark.long
def test_ranks_lie_together_on_several_machines_and_after_restarts() -> None:
    """8 GPUs a machine: 8 actor ranks, 2 engines on 2 GPUs each, and the reference on what is left."""
    found = on_fake_machines(
        3,
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        *("cluster.actor_world_size=8", "cluster.rollout_world_size=4", "cluster.colocate=separate"),
    )
    assert found["placed"] == {"actor": [0] * 8, "rollout": [1, 1], "ref": [1] * 4 + [2] * 8, "reward": [1]}
    assert found["two"] == {"actor": [0] * 8, "rollout": [1, 1], "ref": [1] * 4, "reward": [1]}
    assert found["beside"] == [1] * 8 + [2] * 8, "the first group was given the last machine"
    pair = found["gpus"]["actor_ref"]
    assert pair["actor"] == pair["ref"] != pair["rollout"], "the reference lies beside the actor"
    shared = found["gpus"]["all"]
    first, second = (gpu for (gpu,) in shared["actor"])
    assert first != second, "each actor rank has a GPU, which it shares"
    assert shared["rollout"] == [[first]], "Ray gives an engine a share of the first of its GPUs"
    assert shared["told"] == [[first, second]]
    assert found["cpu"] == {"actor": [0, 0, 1, 2], "rollout": [1], "ref": [2], "reward": [0]}
    assert found["replaced"] == [True, True], "a new process is where the old one was"
    assert found["room"] == [False, False], "the other machines are full"
    assert all("its machine is lost" in failure for failure in found["failures"]), "one fault, as many as there may be"
    assert found["elsewhere"], "its node is gone"
    assert found["moved"], "all that was on one machine is on one machine again"
    nodes = found["nodes"]
    machines = [set(nodes["actor"]), set(nodes["rollout"] + nodes["ref"][:4]), set(nodes["ref"][4:])]
    assert sorted(machines, key=min) == [{0}, {1}, {2}], "whichever the new node is"


@pytest.mark.long
def test_ranks_lie_together_on_eight_machines() -> None:
    """Copies of the weights and engines on 4 GPUs each: none is cut."""
    found = on_fake_machines(
        8,
        *("actor_rollout_ref.actor.fsdp_config.fsdp_size=4", "data.train_batch_size=32"),
        *("cluster.actor_world_size=32", "cluster.rollout_world_size=24", "cluster.ref_world_size=8"),
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
    )["placed"]
    assert found["actor"] == [machine for machine in range(4) for _ in range(8)]
    assert found["rollout"] == [4, 4, 5, 5, 6, 6]
    assert found["ref"] == [7] * 8


@pytest.mark.usefixtures("local_ray")
def test_every_process_has_its_bundle_in_rank_order() -> None:
    (group,), bundles = reserve(slots_of({"actor": [0, 0], "ref": [0]}, NEEDS))
    assert [(b.num_cpus, b.num_gpus, b.index) for b in bundles["actor"]] == [(0.05, 0, 0), (0.05, 0, 1)]
    assert [(b.num_cpus, b.index) for b in bundles["ref"]] == [(0.1, 2)]
    assert {b.group for part in bundles.values() for b in part} == {group}
    assert group.bundle_specs == [{"CPU": 0.05}, {"CPU": 0.05}, {"CPU": 0.1}]
    release([group])


@pytest.mark.usefixtures("local_ray")
def test_each_machine_has_a_group() -> None:
    """There is one machine, so the second group is on it too."""
    groups, bundles = reserve(slots_of({"actor": [0, 1], "ref": [1]}, NEEDS))
    assert [group.bundle_specs for group in groups] == [[{"CPU": 0.05}], [{"CPU": 0.05}, {"CPU": 0.1}]]
    assert [(b.group, b.index) for b in bundles["actor"]] == [(groups[0], 0), (groups[1], 0)]
    assert [(b.group, b.index) for b in bundles["ref"]] == [(groups[1], 1)]
    release(groups)


@pytest.mark.deep
@pytest.mark.usefixtures("local_ray")
def test_what_works_alone_has_a_group_of_its_own() -> None:
    groups, bundles = reserve(
        slots_of({"actor": [0], "rollout": [0, 1], "reward": [1]}, dict.fromkeys(ROLES, (0.05, 0.0)))
    )
    assert [group.bundle_specs for group in groups] == [[{"CPU": 0.05}]] * 4
    assert [[b.group for b in bundles[role]] for role in ROLES] == [[groups[0]], groups[1:3], groups[3:]]
    release(groups)


@pytest.mark.deep
@pytest.mark.usefixtures("local_ray")
def test_what_is_not_required_is_not_waited_for() -> None:
    slots = [
        Slot(0, 0.0, (Seat("rollout", rank, cpus, 0.0),), required=rank == 0) for rank, cpus in enumerate([0.05, 100.0])
    ]
    groups, bundles = reserve(slots)
    assert [(b.placed, b.required) for b in bundles["rollout"]] == [(True, True), (False, False)]
    assert [group.bundle_specs for group in groups] == [[{"CPU": 0.05}], [{"CPU": 100.0}]]
    release(groups)


@pytest.mark.deep
@pytest.mark.usefixtures("local_ray")
def test_in_a_restart_one_of_those_that_work_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for all but the second engine, which wants 100 CPUs. Of what must be there all is, or nothing."""
    slots = [
        Slot(machine, 0.0, (Seat(role, rank, cpus, 0.0),))
        for machine, role, rank, cpus in (
            *((0, "actor", 0, 0.07), (0, "rollout", 0, 0.07)),
            *((1, "rollout", 1, 100.0), (1, "reward", 0, 0.07)),
        )
    ]
    with pytest.raises(ConfigError):
        reserve(slots, timeout_s=0.5)

    def clock() -> float:
        """The hour to wait is over as soon as all is placed that there is room for."""
        placed = [e for e in placement_group_table().values() if e["state"] == "CREATED"]
        return time.monotonic() + 3600 * ([e["bundles"] for e in placed].count({0: {"CPU": 0.07}}) == 3)

    with monkeypatch.context() as patch:
        patch.setattr(resources, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
        groups, bundles = reserve(slots, timeout_s=3600, one_is_enough=True)
    assert {role: [b.placed for b in bundles[role]] for role in ROLES} == {
        "actor": [True],
        "rollout": [True, False],
        "reward": [True],
    }
    release(groups)
    with pytest.raises(ConfigError):
        reserve(slots_of({"actor": [0, 1]}, {"actor": (1.2, 0.0)}), timeout_s=0.5, one_is_enough=True)


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("needs", [(1, 0.1, 1.0), (3, 100.0, 0.0)], ids=["gpu", "cpu"])
def test_what_the_cluster_has_not_is_refused(monkeypatch: pytest.MonkeyPatch, needs: tuple) -> None:
    monkeypatch.setattr(resources, "PLACEMENT_TIMEOUT_S", 0.5)
    count, cpus, gpus = needs
    with pytest.raises(ConfigError) as caught:
        reserve(slots_of({"actor": [0], "rollout": [0] * count}, {"actor": (0.1, 0.0), "rollout": (cpus, gpus)}))
    message = str(caught.value)
    says(message, f"actor 1 x (0.1 CPU, 0 GPU), rollout {count} x ({cpus:g} CPU, {gpus:g} GPU)", "1 machine")
    says(message, f"{0.1 + count * cpus:g} CPU and {count * gpus:g} GPU", "2 CPU and 0 GPU", "trainer.n_gpus_per_node")


@pytest.mark.deep
@pytest.mark.usefixtures("local_ray")
def test_a_refused_request_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(resources, "PLACEMENT_TIMEOUT_S", 0.5)
        with pytest.raises(ConfigError):
            reserve(slots_of({"rollout": [0]}, {"rollout": (50.0, 0.0)}))
    states = {
        entry["state"] for entry in placement_group_table().values() if {"CPU": 50.0} in entry["bundles"].values()
    }
    assert states == {"REMOVED"}
    groups, bundles = reserve(slots_of({"actor": [0]}, NEEDS))
    assert len(bundles["actor"]) == 1
    release(groups)
