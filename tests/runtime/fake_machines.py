"""Three Ray nodes on this machine, with 8 GPUs each that are none: where the processes of a run are put, as JSON.

python -m tests.runtime.fake_machines [key=value ...]; a process of its own, since a driver has one cluster at a time
"""

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
from grpo_dist.runtime.process import Process
from grpo_dist.runtime.resources import nodes_in_order, release, reserve

NODES = 3
LIMIT_S = 120.0
TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
ON_CPUS = ("trainer.n_gpus_per_node=0", "cluster.actor_world_size=4")
ON_CPUS += ("cluster.rollout_world_size=null", f"{TENSOR_PARALLEL}=1")


def start() -> Cluster:
    """A head without GPUs, where the driver is, and the nodes."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the tests hide all GPUs, and Ray has no more than can be seen
    head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(NODES):
        cluster.add_node(wait=False, num_cpus=64, num_gpus=8)
    cluster.wait_for_nodes(timeout=LIMIT_S)
    ray.init(address=cluster.address, log_to_driver=False)
    return cluster


def wait_until_free() -> None:
    deadline = time.monotonic() + LIMIT_S
    while ray.available_resources().get("GPU", 0) < 8.0 * NODES:
        assert time.monotonic() < deadline, "Ray does not give the GPUs back"
        time.sleep(0.05)


def placed(wanted: Any) -> dict[str, list[int]]:
    """By role and rank, the number of the node where it has its place; the driver's does not count."""
    wait_until_free()
    groups, bundles = reserve(wanted)
    order = [node["NodeID"] for node in nodes_in_order()][1:]
    tables = {b.group: placement_group_table(b.group)["bundles_to_node_id"] for part in bundles.values() for b in part}
    found = {role: [order.index(tables[b.group][b.index]) for b in part] for role, part in bundles.items()}
    release(groups)
    return found


def layout(*overrides: str) -> dict[str, list[int]]:
    return placed(slots(load_config(["cluster=multi_node", *sys.argv[1:], *overrides])[0]))


def gpus(*overrides: str) -> dict[str, list[list[str]]]:
    """By role and rank, the GPUs that a process has or shares; of engines those that they are told to use."""
    config, _ = load_config(["cluster=node8", "model=qwen3_8b", "trainer.n_gpus_per_node=2", *overrides])
    plan = make_plan(config)
    place = plan.place
    groups, bundles = reserve(slots(config))
    found = {}
    for role in [role for role, size in place.world_sizes.items() if size]:
        args: list[tuple[Any, ...]] = [()] * len(bundles[role])
        workers = WorkerGroup.spawn(role, Process, bundles[role], args=args, limits=TimeLimits(LIMIT_S))
        found[role] = run(workers.call_home())
    engines = [plan.engine(index) for index in range(place.num_engines)] if place.shares_gpu else []
    told = {"told": [list(each.gpus) for each in on_gpus_of(engines, found["actor"])]} if engines else {}
    release(groups)
    return {role: [list(address.gpus) for address in addresses] for role, addresses in found.items()} | told


def beside_another_job() -> list[int]:
    """Where 16 actor ranks are if another job has the GPUs of the first machine."""
    blocked = placement_group([{"GPU": 8}], strategy="STRICT_PACK", _soft_target_node_id=nodes_in_order()[1]["NodeID"])
    assert blocked.wait(LIMIT_S)
    groups, bundles = reserve(slots_of({"actor": [0] * 8 + [1] * 8}, {"actor": (1.0, 1.0)}))
    order = [node["NodeID"] for node in nodes_in_order()][1:]
    found = [placement_group_table(b.group)["bundles_to_node_id"][b.index] for b in bundles["actor"]]
    release([*groups, blocked])
    return [order.index(node) for node in found]


if __name__ == "__main__":
    cluster = start()
    report = {
        "three": layout(f"trainer.nnodes={NODES}"),
        "two": layout("trainer.nnodes=2"),
        "cpu": layout(f"trainer.nnodes={NODES}", *ON_CPUS),
        "beside": beside_another_job(),
        "pair": gpus(),
        "shared": gpus(f"{TENSOR_PARALLEL}=2", "actor_rollout_ref.actor.use_kl_loss=false"),
    }
    sys.stdout.write("\n" + json.dumps(report) + "\n")  # what Ray writes here may not have ended its line
    ray.shutdown()
    cluster.shutdown()
