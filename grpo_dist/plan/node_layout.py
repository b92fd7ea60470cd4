"""Decides which machine each process runs on, and which processes share GPUs.

On GPUs the ranks of a role fill one machine after the other, so that consecutive ranks are on one machine. A replica of
the actor's weights (`fsdp_size` ranks) and the GPUs of one engine are never split across machines. Roles that share
GPUs (`cluster.colocate`) are placed on the actor's GPUs, rank by rank. On CPU, and for reward processes everywhere,
each role is spread evenly, because its processes compete for the cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.plan.placement import Placement, placement

# By role and rank: index of the machine, in the order of `workers.resources`. It never decreases with the rank.
Homes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Seat:
    """The CPUs and GPUs that Ray reserves for one process; a fraction of a GPU if it shares one."""

    role: str
    rank: int
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True)
class Slot:
    """A Ray placement-group bundle: one process, or several that share a GPU, on one machine.

    One that is not `required` is on whichever machine has room for it, now or later; a run does not wait for it.
    """

    machine: int
    num_gpus: float
    seats: tuple[Seat, ...]
    required: bool = True

    @property
    def num_cpus(self) -> float:
        """CPUs of all processes in the slot."""
        return sum(seat.num_cpus for seat in self.seats)


def slots(config: JobConfig) -> list[Slot]:
    """The slots of all processes of a run, ordered by role and rank, on the machines of `node_layout`."""
    place = placement(config)
    cpus = place.num_cpus_per_worker
    sizes = {"rollout": place.tensor_parallel}
    needs = {role: (cpus * sizes.get(role, 1), place.num_gpus(role)) for role in place.world_sizes}
    alone = slots_of(node_layout(config), needs | {"reward": (cpus, 0.0)})
    shared: dict[int, list[Slot]] = {}  # by index among the actor's GPUs
    for slot in alone:
        seat = slot.seats[0]
        if seat.role in place.sharing:
            shared.setdefault(seat.rank * sizes.get(seat.role, 1), []).append(slot)
    merged = [
        Slot(parts[0].machine, 1.0, tuple(seat for part in parts for seat in part.seats)) for parts in shared.values()
    ]
    ranks = range(place.num_engines, place.num_engines + place.extra_engines)
    extra = [
        Slot(0, place.num_gpus("rollout"), (Seat("rollout", rank, *needs["rollout"]),), required=False)
        for rank in ranks
    ]
    return merged + [slot for slot in alone if slot.seats[0].role not in place.sharing] + extra


def slots_of(homes: Mapping[str, Sequence[int]], needs: Mapping[str, tuple[float, float]]) -> list[Slot]:
    """A slot for each process: `homes` has machines by role and rank, `needs` the CPUs and GPUs of each by role."""
    return [
        Slot(machine, needs[role][1], (Seat(role, rank, *needs[role]),))
        for role, home in homes.items()
        for rank, machine in enumerate(home)
    ]


def node_layout(config: JobConfig) -> Homes:
    """The machine of each process. A role that does not fit gets too few entries, which a rule then reports."""
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
            else:  # on the first of the actor's GPUs that it shares
                homes[role] = homes["actor"][: count * size : size]
            if role == "actor":
                homes[role] = tuple(home for home in homes[role] for _ in range(size))
        for home in (home for role in homes.values() for home in role):
            processes[home] += 1
    if isinstance(config, RunConfig):
        homes["reward"] = spread(config.reward.num_workers, processes)
    return homes


def copy_size(config: JobConfig, place: Placement) -> int | None:
    """Return the actor ranks per replica of the weights with hybrid sharding (HSDP); None if there is one replica."""
    size = config.actor_rollout_ref.actor.fsdp_config.fsdp_size if isinstance(config, RunConfig) else -1
    return size if 0 < size < place.actor_world_size else None


def fill(count: int, size: int, free: list[int]) -> tuple[int, ...]:
    """Place `count` units of `size` GPUs one after the other, each on the first machine that has room for it.

    Args:
        free: GPUs of each machine; reduced in place.

    Returns:
        The machine of each unit; fewer than `count` if not all of them fit.
    """
    homes: list[int] = []
    for machine in range(len(free)):
        fitting = min(free[machine] // size, count - len(homes))
        homes += [machine] * fitting
        free[machine] -= fitting * size
    return tuple(homes)


def spread(count: int, processes: list[int]) -> tuple[int, ...]:
    """The machines of `count` processes that are spread evenly; the remainder goes to those with the fewest processes.

    Args:
        processes: already on each machine; increased in place.
    """
    base, over = divmod(count, len(processes))
    emptiest = set(sorted(range(len(processes)), key=processes.__getitem__)[:over])
    shares = [base + (machine in emptiest) for machine in range(len(processes))]
    for machine, share in enumerate(shares):
        processes[machine] += share
    return tuple(machine for machine, share in enumerate(shares) for _ in range(share))


def _units(config: JobConfig, place: Placement) -> dict[str, tuple[int, int]]:
    """By role: (number of units that must not be split across machines, GPUs per unit)."""
    copy = copy_size(config, place)
    # a replica larger than a machine takes whole machines (by a rule), and the actor starts on the first one
    size = copy if copy is not None and copy <= config.trainer.n_gpus_per_node else 1
    sizes = {"actor": size, "rollout": place.tensor_parallel}
    units = {role: (count // sizes.get(role, 1), sizes.get(role, 1)) for role, count in place.world_sizes.items()}
    if "rollout" in units:
        units["rollout"] = (place.num_engines, place.tensor_parallel)
    return {role: unit for role, unit in units.items() if unit[0]}
