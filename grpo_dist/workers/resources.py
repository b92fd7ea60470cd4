"""One placement group for all workers of a run: every process gets its GPUs and CPUs, or the run ends with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from grpo_dist.errors import ConfigError

# Long enough for a cluster that is there; one that must first be scaled up says so by being late.
PLACEMENT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Bundle:
    """The resources of one process, and its place in the placement group."""

    num_cpus: float
    num_gpus: float
    group: Any
    index: int


def reserve(roles: Mapping[str, tuple[int, float, float]]) -> tuple[Any, dict[str, list[Bundle]]]:
    """Reserve resources for all processes together.

    Args:
        roles: role -> (number of processes, CPUs of each, GPUs of each).

    Returns:
        (placement group, bundles of each role in rank order).

    Raises:
        ConfigError: the cluster does not have the resources; says what was asked for and what there is.
    """
    needs = [(role, cpus, gpus) for role, (count, cpus, gpus) in roles.items() for _ in range(count)]
    group = placement_group([_resources(cpus, gpus) for _, cpus, gpus in needs], strategy="PACK")
    if not group.wait(PLACEMENT_TIMEOUT_S):
        remove_placement_group(group)
        wanted = ", ".join(
            f"{role} {count} x ({cpus:g} CPU, {gpus:g} GPU)" for role, (count, cpus, gpus) in roles.items()
        )
        there = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")}
        raise ConfigError(
            f"the Ray cluster cannot place the workers: asked for {wanted}; it has {there.get('CPU', 0):g} CPU and "
            f"{there.get('GPU', 0):g} GPU. Set trainer.n_gpus_per_node, trainer.nnodes and cluster.* to what is there."
        )
    bundles: dict[str, list[Bundle]] = {role: [] for role in roles}
    for index, (role, cpus, gpus) in enumerate(needs):
        bundles[role].append(Bundle(cpus, gpus, group, index))
    return group, bundles


def release(group: Any) -> None:
    """Give up what `reserve` reserved. Processes that still run there are ended."""
    remove_placement_group(group)


def _resources(num_cpus: float, num_gpus: float) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", num_cpus), ("GPU", num_gpus)) if amount > 0}
