"""Which machine each process is on.

On GPUs the ranks of a role fill one machine after the other, so that neighbours in rank are neighbours in hardware; a
copy of the actor's weights (`fsdp_size` ranks) and the GPUs of one engine are never cut between machines. On CPU, and
for reward processes everywhere, each role is spread evenly, since what its processes share are the cores.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_dist.config.placement import Placement, placement
from grpo_dist.config.schema import RunConfig

# By role and rank: the machine's number, counted from 0 in the order of `workers.resources`. It never falls with rank.
Homes = dict[str, tuple[int, ...]]


def node_layout(config: RunConfig) -> Homes:
    """The machine of each process. A role that does not fit has fewer entries than processes; a rule refuses that."""
    place, machines = placement(config), config.trainer.nnodes
    units = _units(config, place)
    homes: Homes = {}
    processes = [0] * machines
    if place.device == "cpu" or place.shares_gpu:
        for role, (count, _) in units.items():
            homes[role] = spread(count, processes)
    else:
        free = [config.trainer.n_gpus_per_node] * machines
        for role, (count, size) in units.items():
            homes[role] = fill(count, size, free)
        homes["actor"] = _each(homes["actor"], units["actor"][1])
        for home in (home for role in homes.values() for home in role):
            processes[home] += 1
    homes["reward"] = spread(config.reward.num_workers, processes)
    return homes


def copy_size(config: RunConfig, place: Placement) -> int | None:
    """Actor ranks that hold one copy of the weights, where there are several copies (hybrid sharding)."""
    size = config.actor_rollout_ref.actor.fsdp_config.fsdp_size
    return size if 0 < size < place.actor_world_size else None


def fill(count: int, size: int, free: list[int]) -> tuple[int, ...]:
    """Machines for `count` units of `size` GPUs each: the first machine with room for one, unit by unit.

    Args:
        count: units.
        size: GPUs of a unit; it is not cut.
        free: GPUs left on each machine; what is taken is subtracted.

    Returns:
        The machine of each unit, as many as fit.
    """
    found: list[int] = []
    for machine in range(len(free)):
        fitting = min(free[machine] // size, count - len(found))
        found += [machine] * fitting
        free[machine] -= fitting * size
    return tuple(found)


def spread(count: int, processes: list[int]) -> tuple[int, ...]:
    """Machines for `count` processes: equally many on each, what is left over where there are fewest processes.

    Args:
        count: processes.
        processes: of other roles on each machine; these are added.
    """
    each, over = divmod(count, len(processes))
    emptiest = sorted(range(len(processes)), key=processes.__getitem__)[:over]
    shares = [each + (machine in emptiest) for machine in range(len(processes))]
    for machine, share in enumerate(shares):
        processes[machine] += share
    return tuple(machine for machine, share in enumerate(shares) for _ in range(share))


def _units(config: RunConfig, place: Placement) -> dict[str, tuple[int, int]]:
    """By role: units that a machine holds whole, and GPUs of each."""
    copy = copy_size(config, place)
    # a copy that is larger than a machine takes whole machines (a rule), and the actor begins on the first one
    size = copy if copy is not None and copy <= config.trainer.n_gpus_per_node else 1
    units = {
        "actor": (place.actor_world_size // size, size),
        "rollout": (place.num_engines, place.tensor_parallel),
        "ref": (place.ref_world_size, 1),
    }
    return {role: unit for role, unit in units.items() if unit[0]}


def _each(homes: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple(home for home in homes for _ in range(size))
