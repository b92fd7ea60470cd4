"""Which machine each process is on, and which processes share GPUs there.

On GPUs the ranks of a role fill one machine after the other, so that neighbours in rank are neighbours in hardware; a
copy of the actor's weights (`fsdp_size` ranks) and the GPUs of one engine are never cut between machines. Roles that
share GPUs (`cluster.colocate`) lie where the actor is, rank by rank. On CPU, and for reward processes everywhere, each
role is spread evenly, since what its processes share are the cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_dist.config.placement import Placement, placement
from grpo_dist.config.schema import RunConfig

# By role and rank: the machine's number, counted from 0 in the order of `workers.resources`. It never falls with rank.
Homes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Seat:
    """What Ray reserves for one process: CPUs and GPUs, parts of one where it shares a GPU."""

    role: str
    rank: int
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True)
class Slot:
    """The GPUs, or none, that one process has on a machine, or several processes share: a bundle of Ray's."""

    machine: int
    num_gpus: float
    seats: tuple[Seat, ...]

    @property
    def num_cpus(self) -> float:
        """Of all its processes."""
        return sum(seat.num_cpus for seat in self.seats)


def slots(config: RunConfig) -> list[Slot]:
    """All processes of a run, roles in their order and ranks in theirs; see `node_layout` for where they are."""
    place = placement(config)
    cpus = place.num_cpus_per_worker
    sizes = {"rollout": place.tensor_parallel}
    needs = {role: (cpus * sizes.get(role, 1), place.num_gpus(role)) for role in ("actor", "rollout", "ref")}
    alone = slots_of(node_layout(config), needs | {"reward": (cpus, 0.0)})
    shared: dict[int, list[Slot]] = {}  # by the number of the GPU among those that the actor has
    for slot in alone:
        seat = slot.seats[0]
        if seat.role in place.sharing:
            shared.setdefault(seat.rank * sizes.get(seat.role, 1), []).append(slot)
    merged = [
        Slot(parts[0].machine, 1.0, tuple(seat for part in parts for seat in part.seats)) for parts in shared.values()
    ]
    return merged + [slot for slot in alone if slot.seats[0].role not in place.sharing]


def slots_of(homes: Mapping[str, Sequence[int]], needs: Mapping[str, tuple[float, float]]) -> list[Slot]:
    """A slot for each process.

    Args:
        homes: by role and rank, the number of the machine.
        needs: by role, the CPUs and GPUs of each process.
    """
    return [
        Slot(machine, needs[role][1], (Seat(role, rank, *needs[role]),))
        for role, home in homes.items()
        for rank, machine in enumerate(home)
    ]


def node_layout(config: RunConfig) -> Homes:
    """The machine of each process. A role that does not fit has fewer entries than processes; a rule refuses that."""
    place, machines = placement(config), config.trainer.nnodes
    units = _units(config, place)
    homes: Homes = {}
    processes = [0] * machines
    if place.device == "cpu":
        for role, (count, _) in units.items():
            homes[role] = spread(count, processes)
    else:
        free = [config.trainer.n_gpus_per_node] * machines
        for role, (count, size) in units.items():
            if role == "actor" or role not in place.sharing:
                homes[role] = fill(count, size, free)
            else:  # on the first GPU of its own that the actor has
                homes[role] = homes["actor"][: count * size : size]
            if role == "actor":
                homes[role] = tuple(home for home in homes[role] for _ in range(size))
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
