"""Ray placement groups for all workers of a run: every process gets its GPUs and CPUs, or the run stops.

There is one placement group per machine (STRICT_PACK, as in verl), with one bundle for each process or for several that
share a GPU. A single group for all machines would scatter ranks, because Ray distributes its bundles freely: of 8 actor
ranks one might be alone on the second machine. Ranks in one group stay on one machine even if Ray moves the group after
losing a machine; config/node_layout.py decides which ranks those are. Each group asks for a machine of its own, the
driver's first, the others by address. If that machine has no room, Ray takes another one; groups with equal bundles are
then ordered by their machines.
"""

from __future__ import annotations

import ipaddress
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from grpo_dist.errors import ConfigError

if TYPE_CHECKING:
    from grpo_dist.config.node_layout import Slot

# Long enough for a running cluster; one that must first be scaled up exceeds it.
PLACEMENT_TIMEOUT_S = 60.0
# Ray counts resources in units of this; sums of fractions are compared with this tolerance.
_RESOURCE_UNIT = 1e-4


@dataclass(frozen=True)
class Bundle:
    """The resources of one process, and its bundle (`index`) in the placement group of its machine."""

    num_cpus: float
    num_gpus: float
    group: Any
    index: int


def reserve(slots: Sequence[Slot]) -> tuple[list[Any], dict[str, list[Bundle]]]:
    """Reserve resources for all processes together.

    Args:
        slots: the processes with their resources and machines; those of a role in rank order.

    Returns:
        (placement groups, bundles of each role in rank order).

    Raises:
        ConfigError: the cluster does not have the resources; the message says what was requested and what exists.
    """
    needs = [[slot for slot in slots if slot.machine == i] for i in sorted({slot.machine for slot in slots})]
    groups = []
    for wanted, target in zip(needs, _targets(needs), strict=True):
        resources = [_resources(slot.num_cpus, slot.num_gpus) for slot in wanted]
        groups.append(placement_group(resources, strategy="STRICT_PACK", _soft_target_node_id=target))
    deadline = time.monotonic() + PLACEMENT_TIMEOUT_S
    placed = sum(group.wait(max(deadline - time.monotonic(), 0)) for group in groups)
    if placed < len(groups):
        release(groups)
        raise _not_placed(needs, placed)
    groups = _in_order(groups, needs)
    bundles: dict[str, list[Bundle]] = {}
    for group, wanted in zip(groups, needs, strict=True):
        for index, slot in enumerate(wanted):
            for seat in slot.seats:
                bundles.setdefault(seat.role, []).append(Bundle(seat.num_cpus, seat.num_gpus, group, index))
    return groups, bundles


def release(groups: Sequence[Any]) -> None:
    """Remove placement groups. Ray kills processes that still run in them."""
    for group in groups:
        remove_placement_group(group)


def nodes_in_order() -> list[dict[str, Any]]:
    """Ray's records of the live nodes: the driver's first, the others by IP address."""
    here = ray.get_runtime_context().get_node_id()

    def key(node: Mapping[str, Any]) -> tuple[bool, int, str]:
        return node["NodeID"] != here, int(ipaddress.ip_address(node["NodeManagerAddress"])), node["NodeID"]

    return sorted((node for node in ray.nodes() if node["Alive"]), key=key)


def nodes_of(groups: Sequence[Any]) -> set[str]:
    """Ray's ids of the nodes of placed groups."""
    return {_node_id(group) for group in groups}


def _total(wanted: Sequence[Slot]) -> tuple[float, float]:
    """(CPUs, GPUs) of all slots together."""
    return sum(slot.num_cpus for slot in wanted), sum(slot.num_gpus for slot in wanted)


def _targets(needs: Sequence[Sequence[Slot]]) -> list[str]:
    """For each machine the id of the node that it should be; "" if no remaining node is large enough."""
    nodes = nodes_in_order()
    found = []
    for wanted in needs:
        fitting = next((node for node in nodes if _fits(wanted, node["Resources"])), None)
        found.append("" if fitting is None else fitting["NodeID"])
        if fitting is not None:
            nodes.remove(fitting)
    return found


def _in_order(groups: Sequence[Any], needs: Sequence[Sequence[Slot]]) -> list[Any]:
    """The placed groups, reordered so that groups with equal bundles follow the order of their nodes."""
    order = [node["NodeID"] for node in nodes_in_order()]
    found = list(groups)
    alike: dict[tuple[tuple[float, float], ...], list[int]] = {}
    for position, wanted in enumerate(needs):
        alike.setdefault(tuple((slot.num_cpus, slot.num_gpus) for slot in wanted), []).append(position)
    for positions in alike.values():
        members = sorted((groups[position] for position in positions), key=lambda group: order.index(_node_id(group)))
        for position, group in zip(positions, members, strict=True):
            found[position] = group
    return found


def _node_id(group: Any) -> str:
    return str(placement_group_table(group)["bundles_to_node_id"][0])


def _fits(wanted: Sequence[Slot], resources: Mapping[str, float]) -> bool:
    cpus, gpus = _total(wanted)
    return cpus <= resources.get("CPU", 0) + _RESOURCE_UNIT and gpus <= resources.get("GPU", 0) + _RESOURCE_UNIT


def _not_placed(needs: Sequence[Sequence[Slot]], placed: int) -> ConfigError:
    kinds = Counter(
        (seat.role, seat.num_cpus, seat.num_gpus) for wanted in needs for slot in wanted for seat in slot.seats
    )
    wanted = ", ".join(f"{role} {count} x ({cpus:g} CPU, {gpus:g} GPU)" for (role, cpus, gpus), count in kinds.items())
    cpus, gpus = max((_total(wanted) for wanted in needs), key=lambda total: total[::-1])
    fullest = f"{cpus:g} CPU and {gpus:g} GPU"
    there = Counter(
        f"{node['Resources'].get('CPU', 0):g} CPU and {node['Resources'].get('GPU', 0):g} GPU"
        for node in nodes_in_order()
    )
    has = ", ".join(f"{count} with {size}" for size, count in there.items())
    return ConfigError(
        f"the Ray cluster cannot place the workers: requested {wanted}, on {len(needs)} machine(s) with up to "
        f"{fullest} each; {placed} of these fit within {PLACEMENT_TIMEOUT_S:g} s. The cluster has machines: {has}. Set "
        "trainer.n_gpus_per_node, trainer.nnodes, cluster.* and reward.num_workers to what is free."
    )


def _resources(num_cpus: float, num_gpus: float) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", num_cpus), ("GPU", num_gpus)) if amount > 0}
