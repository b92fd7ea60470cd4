"""Placement groups: on the tests' own cluster, and on several Ray nodes with GPUs that are none."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.util.placement_group import placement_group_table

from grpo_dist.errors import ConfigError
from grpo_dist.plan.placement import Seat, Slot, slots_of
from grpo_dist.runtime import resources
from grpo_dist.runtime.resources import Bundle, release, reserve
from tests.messages import says

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
ROLES = ("actor", "rollout", "reward")
NEEDS = {"actor": (0.05, 0.0), "ref": (0.1, 0.0)}  # CPUs and GPUs of each process


@pytest.mark.long
def test_ranks_lie_together_on_several_machines() -> None:
    """8 GPUs a machine: 8 actor ranks, 2 engines on 2 GPUs each, and the reference on what is left."""
    overrides = ["actor_rollout_ref.rollout.tensor_model_parallel_size=2", "cluster.colocate=separate"]
    overrides += ["cluster.actor_world_size=8", "cluster.rollout_world_size=4"]
    command = [sys.executable, "-m", "tests.runtime.fake_machines", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"')))
    assert found["three"] == {"actor": [0] * 8, "rollout": [1, 1], "ref": [1] * 4 + [2] * 8, "reward": [1]}
    assert found["two"] == {"actor": [0] * 8, "rollout": [1, 1], "ref": [1] * 4, "reward": [1]}
    assert found["cpu"] == {"actor": [0, 0, 1, 2], "rollout": [1], "ref": [2], "reward": [0]}
    assert found["beside"] == [1] * 8 + [2] * 8, "the first group was given the last machine"
    pair, shared = found["pair"], found["shared"]
    assert pair["actor"] == pair["ref"] != pair["rollout"], "the reference lies beside the actor"
    first, second = (gpu for (gpu,) in shared["actor"])
    assert first != second, "each actor rank has a GPU, which it shares"
    assert shared["rollout"] == [[first]], "Ray gives an engine a share of the first of its GPUs"
    assert shared["told"] == [[first, second]]


@contextlib.contextmanager
def held(slots: list[Slot], **how: Any) -> Iterator[tuple[list[Any], dict[str, list[Bundle]]]]:
    groups, bundles = reserve(slots, **how)
    try:
        yield groups, bundles
    finally:
        release(groups)


@pytest.mark.usefixtures("local_ray")
def test_each_machine_has_a_group_in_which_every_process_has_its_bundle_in_rank_order() -> None:
    """There is one machine, so a second group is on it too."""
    with held(slots_of({"actor": [0, 0], "ref": [0]}, NEEDS)) as ((group,), bundles):
        assert [(b.num_cpus, b.num_gpus, b.index) for b in bundles["actor"]] == [(0.05, 0, 0), (0.05, 0, 1)]
        assert [(b.num_cpus, b.index) for b in bundles["ref"]] == [(0.1, 2)]
        assert {b.group for part in bundles.values() for b in part} == {group}
        assert group.bundle_specs == [{"CPU": 0.05}, {"CPU": 0.05}, {"CPU": 0.1}]
    with held(slots_of({"actor": [0, 1], "ref": [1]}, NEEDS)) as (groups, bundles):
        assert [group.bundle_specs for group in groups] == [[{"CPU": 0.05}], [{"CPU": 0.05}, {"CPU": 0.1}]]
        assert [(b.group, b.index) for b in bundles["actor"]] == [(groups[0], 0), (groups[1], 0)]
        assert [(b.group, b.index) for b in bundles["ref"]] == [(groups[1], 1)]


@pytest.mark.deep
@pytest.mark.usefixtures("local_ray")
def test_what_works_alone_has_a_group_of_its_own_and_is_not_waited_for_if_it_is_not_required() -> None:
    alone = slots_of({"actor": [0], "rollout": [0, 1], "reward": [1]}, dict.fromkeys(ROLES, (0.05, 0.0)))
    with held(alone) as (groups, bundles):
        assert [group.bundle_specs for group in groups] == [[{"CPU": 0.05}]] * 4
        assert [[b.group for b in bundles[role]] for role in ROLES] == [[groups[0]], groups[1:3], groups[3:]]
    extra = [
        Slot(0, 0.0, (Seat("rollout", rank, cpus, 0.0),), required=rank == 0) for rank, cpus in enumerate([0.05, 100.0])
    ]
    with held(extra) as (groups, bundles):
        assert [(b.placed, b.required) for b in bundles["rollout"]] == [(True, True), (False, False)]
        assert [group.bundle_specs for group in groups] == [[{"CPU": 0.05}], [{"CPU": 100.0}]]


@pytest.mark.deep
@pytest.mark.usefixtures("local_ray")
def test_in_a_restart_one_of_those_that_work_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for all but the second engine, which wants 100 CPUs. Of what must be there all is, or nothing."""
    wanted = [(0, "actor", 0, 0.07), (0, "rollout", 0, 0.07), (1, "rollout", 1, 100.0), (1, "reward", 0, 0.07)]
    slots = [Slot(machine, 0.0, (Seat(role, rank, cpus, 0.0),)) for machine, role, rank, cpus in wanted]
    with pytest.raises(ConfigError):
        reserve(slots, timeout_s=0.5)

    def clock() -> float:
        """The hour to wait is over as soon as all is placed that there is room for."""
        placed = [e for e in placement_group_table().values() if e["state"] == "CREATED"]
        return time.monotonic() + 3600 * ([e["bundles"] for e in placed].count({0: {"CPU": 0.07}}) == 3)

    with monkeypatch.context() as patch:
        patch.setattr(resources, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
        with held(slots, timeout_s=3600, one_is_enough=True) as (_, bundles):
            placed = {role: [b.placed for b in bundles[role]] for role in ROLES}
    assert placed == {"actor": [True], "rollout": [True, False], "reward": [True]}
    with pytest.raises(ConfigError):
        reserve(slots_of({"actor": [0, 1]}, {"actor": (1.2, 0.0)}), timeout_s=0.5, one_is_enough=True)


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("needs", [(1, 0.1, 1.0), (3, 50.0, 0.0)], ids=["gpu", "cpu"])
def test_what_the_cluster_has_not_is_refused_and_holds_nothing(needs: tuple) -> None:
    count, cpus, gpus = needs
    slots = slots_of({"actor": [0], "rollout": [0] * count}, {"actor": (0.13, 0.0), "rollout": (cpus, gpus)})
    with pytest.raises(ConfigError) as caught:
        reserve(slots, timeout_s=0.5)
    message = str(caught.value)
    says(message, f"actor 1 x (0.13 CPU, 0 GPU), rollout {count} x ({cpus:g} CPU, {gpus:g} GPU)", "1 machine")
    says(message, f"{0.13 + count * cpus:g} CPU and {count * gpus:g} GPU", "2 CPU and 0 GPU", "trainer.n_gpus_per_node")
    asked = [{"CPU": 0.13}, {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}]
    entries = [entry for entry in placement_group_table().values() if entry["bundles"][0] in asked]
    assert {entry["state"] for entry in entries} == {"REMOVED"}
    with held(slots_of({"actor": [0]}, NEEDS)) as (_, bundles):
        assert len(bundles["actor"]) == 1
