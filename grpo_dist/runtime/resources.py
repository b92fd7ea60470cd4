"""Ray placement groups for all workers of a run: every process gets its GPUs and CPUs, or the run stops.

There is one placement group per machine (STRICT_PACK, as in verl), with one bundle for each process or for several that
share a GPU. A single group for all machines would scatter ranks, because Ray distributes its bundles freely: of 8 actor
ranks one might be alone on the second machine. Ranks in one group stay on one machine even if Ray moves the group after
losing a machine; plan/placement.py decides which ranks those are. Each group asks for a machine of its own, the
driver's first, the others by address. If that machine has no room, Ray takes another one; groups with equal bundles are
then ordered by their machines.

An engine with GPUs of its own and a reward process work alone, so each is a group of its own, on the machine that the
layout has for it or on any other: after a machine was lost it needs no more room than its own. Engines that are not
required have such groups too, which Ray places when there is room.
"""

from __future__ import annotations

import ipaddress
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from grpo_dist.errors import ConfigError

if TYPE_CHECKING:
    from grpo_dist.plan.placement import Slot

# Long enough for a running cluster; one that must first be scaled up exceeds it.
PLACEMENT_TIMEOUT_S = 60.0
POLL_S = 0.05
# Roles whose processes work alone.
ALONE = ("rollout", "reward")
# Ray counts resources in units of this; sums of fractions are compared with this tolerance.
_RESOURCE_UNIT = 1e-4


@dataclass(frozen=True)
class Bundle:
    """The resources of one process, and its bundle (`index`) in a placement group.

    `placed` is False if no machine had room for it when it was reserved, and `required` whether the run had to have it.
    """

    num_cpus: float
    num_gpus: float
    group: Any
    index: int
    placed: bool = True
    required: bool = True


def reserve(
    slots: Sequence[Slot], *, timeout_s: float | None = None, one_is_enough: bool = False
) -> tuple[list[Any], dict[str, list[Bundle]]]:
    """Reserve resources for all processes together.

    Args:
        slots: the processes with their resources and machines; those of a role in rank order.
        timeout_s: seconds to wait for room; None: `PLACEMENT_TIMEOUT_S`.
        one_is_enough: whether of a role whose processes work alone one must have room, and not all.

    Returns:
        (placement groups, bundles of each role in rank order).
    """
    extra, slots = [slot for slot in slots if not slot.required], [slot for slot in slots if slot.required]
    needs = [[slot for slot in slots if slot.machine == i] for i in sorted({slot.machine for slot in slots})]
    targets = _targets(needs)
    timeout_s = PLACEMENT_TIMEOUT_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + timeout_s
    parts = [[slot for slot in wanted if not _works_alone(slot)] for wanted in needs]
    together = [(part, target) for part, target in zip(parts, targets, strict=True) if part]
    groups = [_group(part, target) for part, target in together]
    # first, so that processes that fit anywhere do not take the room of those that must be together
    placed = sum(group.wait(max(deadline - time.monotonic(), 0)) for group in groups)
    if placed == len(groups):
        held = list(zip(_in_order(groups, [part for part, _ in together]), (part for part, _ in together), strict=True))
        near = [(slot, target) for wanted, target in zip(needs, targets, strict=True) for slot in wanted]
        alone = [(_group([slot], target), [slot]) for slot, target in near if _works_alone(slot)]
        groups += [group for group, _ in alone]
        while not all(is_placed(group) for group, _ in alone) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if _enough(alone, one_is_enough=one_is_enough):
            later = [(_group([slot], ""), [slot]) for slot in extra]
            return [*groups, *(group for group, _ in later)], _bundles([*held, *alone, *later])
        placed = sum(map(is_placed, groups))
    release(groups)
    raise _not_placed(needs, f"{placed} of {len(groups)} parts", timeout_s)


def _bundles(held: Sequence[tuple[Any, Sequence[Slot]]]) -> dict[str, list[Bundle]]:
    """The bundles of each role in rank order, from the placement groups and what is in them."""
    bundles: dict[str, dict[int, Bundle]] = {}
    for group, wanted in held:
        placed = is_placed(group)
        for index, slot in enumerate(wanted):
            for seat in slot.seats:
                bundle = Bundle(seat.num_cpus, seat.num_gpus, group, index, placed, slot.required)
                bundles.setdefault(seat.role, {})[seat.rank] = bundle
    return {role: [by_rank[rank] for rank in sorted(by_rank)] for role, by_rank in bundles.items()}


def requested(slots: Sequence[Slot]) -> str:
    """Say how many processes of which size are required, for messages."""
    return amounts((seat.role, seat.num_cpus, seat.num_gpus) for slot in slots if slot.required for seat in slot.seats)


def amounts(processes: Iterable[tuple[str, float, float]]) -> str:
    """Say the same of processes given as (role, CPUs, GPUs)."""
    kinds = Counter(processes).items()
    return ", ".join(f"{role} {count} x ({cpus:g} CPU, {gpus:g} GPU)" for (role, cpus, gpus), count in kinds)


def machine_sizes(nodes: Iterable[Mapping[str, Any]]) -> str:
    """Say how many machines of which size these nodes of Ray are, for messages."""
    sizes = Counter(
        f"{node['Resources'].get('CPU', 0):g} CPU and {node['Resources'].get('GPU', 0):g} GPU" for node in nodes
    )
    return ", ".join(f"{count} with {size}" for size, count in sizes.items())


def is_placed(group: Any) -> bool:
    """Tell if a placement group is on a machine; not so while Ray looks for another one in place of a lost one."""
    return placement_group_table(group)["state"] == "CREATED"


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


def nodes_of(groups: Iterable[Any]) -> set[str]:
    """Ray's ids of the nodes of the groups that are placed."""
    return {_node_id(group) for group in groups if is_placed(group)}


def _works_alone(slot: Slot) -> bool:
    return all(seat.role in ALONE for seat in slot.seats)


def _group(wanted: Sequence[Slot], target: str) -> Any:
    resources = ({"CPU": slot.num_cpus, "GPU": slot.num_gpus} for slot in wanted)
    bundles = [{name: amount for name, amount in bundle.items() if amount > 0} for bundle in resources]
    return placement_group(bundles, strategy="STRICT_PACK", _soft_target_node_id=target)


def _enough(alone: Sequence[tuple[Any, Sequence[Slot]]], *, one_is_enough: bool) -> bool:
    """Tell if all groups of processes that work alone are placed; or one for each role."""
    placed = [is_placed(group) for group, _ in alone]
    if not one_is_enough:
        return all(placed)
    roles = [slot.seats[0].role for _, (slot,) in alone]
    return set(roles) == {role for role, is_there in zip(roles, placed, strict=True) if is_there}


def _total(wanted: Sequence[Slot]) -> tuple[float, float]:
    return sum(slot.num_cpus for slot in wanted), sum(slot.num_gpus for slot in wanted)


def _targets(needs: Sequence[Sequence[Slot]]) -> list[str]:
    """For each machine the id of the node that it should be; "" if no remaining node is large enough."""
    nodes = nodes_in_order()
    node_ids = []
    for wanted in needs:
        fitting = next((node for node in nodes if _fits(wanted, node["Resources"])), None)
        node_ids.append("" if fitting is None else fitting["NodeID"])
        if fitting is not None:
            nodes.remove(fitting)
    return node_ids


def _in_order(groups: Sequence[Any], needs: Sequence[Sequence[Slot]]) -> list[Any]:
    """The placed groups, reordered so that groups with equal bundles follow the order of their nodes."""
    order = [node["NodeID"] for node in nodes_in_order()]
    chosen = list(groups)
    alike: dict[tuple[tuple[float, float], ...], list[int]] = {}
    for position, wanted in enumerate(needs):
        alike.setdefault(tuple((slot.num_cpus, slot.num_gpus) for slot in wanted), []).append(position)
    for positions in alike.values():
        members = sorted((groups[position] for position in positions), key=lambda group: order.index(_node_id(group)))
        for position, group in zip(positions, members, strict=True):
            chosen[position] = group
    return chosen


def _node_id(group: Any) -> str:
    return str(placement_group_table(group)["bundles_to_node_id"][0])


def _fits(wanted: Sequence[Slot], resources: Mapping[str, float]) -> bool:
    cpus, gpus = _total(wanted)
    return cpus <= resources.get("CPU", 0) + _RESOURCE_UNIT and gpus <= resources.get("GPU", 0) + _RESOURCE_UNIT


def _not_placed(needs: Sequence[Sequence[Slot]], placed: str, timeout_s: float) -> ConfigError:
    wanted = requested([slot for wanted in needs for slot in wanted])
    cpus, gpus = max((_total(wanted) for wanted in needs), key=lambda total: total[::-1])
    fullest = f"{cpus:g} CPU and {gpus:g} GPU"
    has = machine_sizes(nodes_in_order())
    return ConfigError(
        f"the Ray cluster cannot place the workers: requested {wanted}, on {len(needs)} machine(s) with up to "
        f"{fullest} each; {placed} of it fit within {timeout_s:g} s. The cluster has machines: {has}. Set "
        "trainer.n_gpus_per_node, trainer.nnodes, cluster.* and reward.num_workers to what is free."
    )
