"""Several Ray nodes on this machine, with GPUs that are none: where the processes of a run are put, as JSON.

    python -m tests.runtime.fake_machines NODES [key=value ...]

A process of its own: a driver has one cluster at a time, and the tests' own is another. Started by a test, whose
environment closes Ray to other machines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table

from grpo_dist.plan.commands import load_config
from grpo_dist.plan.placement import slots, slots_of
from grpo_dist.plan.plan import make_plan
from grpo_dist.run.build import on_gpus_of
from grpo_dist.runtime.event_loop import TimeLimits, run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.nodes import Nodes, RestartBudget
from grpo_dist.runtime.process import Process
from grpo_dist.runtime.resources import Bundle, nodes_in_order, release, reserve

TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
NO_KL = "actor_rollout_ref.actor.use_kl_loss=false"
SIZE = {"num_cpus": 64, "num_gpus": 8}
LIMIT_S = 120.0


def start(nodes: int) -> Cluster:
    """A head without GPUs, where the driver is, and so many nodes with 8 each. A node that is gone is missed soon."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the tests hide all GPUs, and Ray has no more than can be seen
    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
    head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "_system_config": soon}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(nodes):
        cluster.add_node(wait=False, **SIZE)
    cluster.wait_for_nodes(timeout=LIMIT_S)
    ray.init(address=cluster.address, log_to_driver=False)
    return cluster


def found(bundles: dict[str, list[Bundle]], order: list[str]) -> dict[str, list[int]]:
    """By role and rank, the place of its node in `order`."""
    tables = {b.group: placement_group_table(b.group)["bundles_to_node_id"] for part in bundles.values() for b in part}
    return {role: [order.index(tables[b.group][b.index]) for b in part] for role, part in bundles.items()}


def layout(overrides: list[str]) -> tuple[list[Any], dict[str, list[Bundle]], dict[str, list[int]]]:
    """Reserve for a config: placement groups, bundles, and the nodes by role and rank."""
    config, _ = load_config(["cluster=multi_node", *overrides])
    groups, bundles = reserve(slots(config))
    return groups, bundles, found(bundles, order())


def order() -> list[str]:
    """Node ids, without the driver's."""
    return [node["NodeID"] for node in nodes_in_order()][1:]


def lose(cluster: Cluster, bundles: dict[str, list[Bundle]]) -> dict[str, Any]:
    """Lose a worker of an engine, then its whole node, for which another one comes; each time a new process starts."""
    engines = WorkerGroup.spawn("rollout", Process, bundles["rollout"], args=[()] * 2, limits=TimeLimits(LIMIT_S))
    before = run(engines.call_home())
    ray.kill(engines.handles[1])
    engines.respawn(1)
    replaced = run(engines.call_home())
    victim = before[0].node_id
    cluster.remove_node(next(node for node in cluster.worker_nodes if node.node_id == victim), allow_graceful=False)
    budget = RestartBudget(1, Nodes(wait_minutes=LIMIT_S / 60))
    for rank in range(2):
        run(budget.judge(engines.lost(rank, "generate", "gone"), engines.node_id(rank)))
        engines.retire(rank)
    room = [run(budget.nodes.has_room(bundle)) for bundle in bundles["rollout"]]
    cluster.add_node(wait=False, **SIZE)
    run(budget.nodes.wait_for_room("rollout", bundles["rollout"]))
    for rank in range(2):
        engines.respawn(rank)
    moved = run(engines.call_home())
    return {
        "replaced": [address.node_id == victim for address in replaced],
        "room": room,
        "failures": budget.failures,
        "moved": len({address.node_id for address in moved}) == 1,
        "elsewhere": all(address.node_id != victim for address in moved),
        "nodes": found(bundles, order()),
    }


def gpus(overrides: list[str]) -> dict[str, list[list[str]]]:
    """By role and rank, the GPUs that a process has or shares; of engines those that they are told to use."""
    config, _ = load_config(["cluster=node8", "model=qwen3_8b", *overrides])
    plan = make_plan(config)
    place = plan.place
    groups, bundles = reserve(slots(config))
    found = {}
    for role in [role for role, size in place.world_sizes.items() if size]:
        args: list[tuple[Any, ...]] = [()] * len(bundles[role])
        workers = WorkerGroup.spawn(role, Process, bundles[role], args=args, limits=TimeLimits(LIMIT_S))
        found[role] = run(workers.call_home())
    engines = [plan.engine(index) for index in range(place.num_engines)]
    engines = on_gpus_of(engines, found["actor"]) if place.shares_gpu else []
    release(groups)
    told = {"told": [list(each.gpus) for each in engines]} if engines else {}
    return {role: [list(address.gpus) for address in addresses] for role, addresses in found.items()} | told


def wait_until_free(gpus: float) -> None:
    """Wait until Ray has that many GPUs to give."""
    deadline = time.monotonic() + LIMIT_S
    while ray.available_resources().get("GPU", 0) < gpus:
        assert time.monotonic() < deadline, "Ray does not give the GPUs back"
        time.sleep(0.05)


def beside_another_job() -> list[int]:
    """Where 16 actor ranks are if another job has the GPUs of the first machine."""
    blocked = placement_group([{"GPU": 8}], strategy="STRICT_PACK", _soft_target_node_id=order()[0])
    assert blocked.wait(LIMIT_S)
    groups, bundles = reserve(slots_of({"actor": [0] * 8 + [1] * 8}, {"actor": (1.0, 1.0)}))
    placed = found(bundles, order())["actor"]
    release([*groups, blocked])
    return placed


def main(nodes: int, overrides: list[str]) -> None:
    cluster = start(nodes)
    groups, bundles, placed = layout([f"trainer.nnodes={nodes}", *overrides])
    report: dict[str, Any] = {"placed": placed}
    if nodes == 3:
        report |= lose(cluster, bundles)
        release(groups)
        wait_until_free(8.0 * nodes)
        report["beside"] = beside_another_job()
        wait_until_free(8.0 * nodes)
        report["two"] = layout(["trainer.nnodes=2", *overrides])[2]
        report["gpus"] = {
            "actor_ref": gpus(["trainer.n_gpus_per_node=2"]),
            "all": gpus(["trainer.n_gpus_per_node=2", f"{TENSOR_PARALLEL}=2", NO_KL]),
        }
        report["cpu"] = layout(["trainer.nnodes=3", "trainer.n_gpus_per_node=0", "cluster.actor_world_size=4"])[2]
    sys.stdout.write("\n" + json.dumps(report) + "\n")  # what Ray writes here may not have ended its line
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
