"""Decides how many processes, GPUs and CPUs each role gets, and on which machine each process runs.

`cluster.*` says how many, with a default for every null. Without GPUs: 2 actor ranks for the built-in model and 1 for
larger ones, as many of other roles that train, and 1 process of each other role, sharing the CPU cores. With GPUs
`cluster.colocate` says which roles share them. "actor_ref": about half of the GPUs run the actor and the roles that may
lie beside it, and the others generate. "all": each GPU runs all roles; the default on one GPU, and if one engine needs
all GPUs. "separate": no GPU is shared.

On GPUs the ranks of a role fill one machine after the other, so that consecutive ranks are on one machine. A replica of
the actor's weights (`fsdp_size` ranks) and the GPUs of one engine are never split across machines. Roles that share
GPUs are placed on the actor's, rank by rank. On CPU, and for reward processes everywhere, each role is spread evenly,
because its processes compete for the cores. Nothing is checked here: placement_rules.py compares the result with the
machines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_dist.config.keys import value_of
from grpo_dist.config.processor import physical_cores
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.config.schema_roles import Colocation, Device
from grpo_dist.plan.roles import ROLES, roles_of, table_of

# Logical CPUs that Ray reserves per process on CPU: small, so that all roles fit on a laptop.
CPU_SHARE = 0.1
# Up to so many processes that share a GPU get equal parts of it from Ray, however many there are.
_FEW = 5
# By role and rank: index of the machine, in the order of `workers.resources`. It never decreases with the rank.
Homes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Placement:
    """Number of processes of each role, and their resources.

    Args:
        world_sizes: number of processes by role; for rollout those of all engines together. Roles that the run lacks
            have 0, and the pool of reward processes, which need no GPUs, is left out.
        tensor_parallel: GPUs per engine, or processes on CPU.
        colocate: which roles share GPUs; "separate" on CPU.
        num_devices: GPUs used by all roles together; on CPU the number of machines.
        num_cpus_per_worker: logical CPUs that Ray reserves for one process.
        num_threads: compute threads of one process on CPU, by role that is started.
        extra_engines: engines beyond those of rollout_world_size, which start when there is room for them.
    """

    device: Device
    world_sizes: dict[str, int]
    tensor_parallel: int
    colocate: Colocation
    num_devices: int
    num_cpus_per_worker: float
    num_threads: Mapping[str, int]
    extra_engines: int

    @property
    def num_engines(self) -> int:
        """Number of rollout engines that the run starts with."""
        return max(1, self.rollout_world_size // self.tensor_parallel)

    @property
    def actor_world_size(self) -> int:
        """Number of actor processes."""
        return self.world_sizes["actor"]

    @property
    def rollout_world_size(self) -> int:
        """Number of processes of all engines, engines * tensor_parallel; 0 in a run without engines."""
        return self.world_sizes.get("rollout", 0)

    def row_groups(self, config: RunConfig, role: str) -> int:
        """Ranks of a role that work on different rows: those that split sequences count once."""
        return max(1, self.world_sizes[role] // config.sequence_parallel_size(role))

    @property
    def shares_gpu(self) -> bool:
        """Tell if the engines share GPUs with the actor."""
        return self.colocate == "all"

    @property
    def sharing(self) -> tuple[str, ...]:
        """The roles that share the actor's GPUs, the actor included; () if none does."""
        if self.colocate == "separate":
            return ()
        roles = tuple(role for role, size in self.world_sizes.items() if size and self.colocate in ROLES[role].shares)
        return roles if len(roles) > 1 else ()

    def num_gpus(self, role: str) -> float:
        """GPUs that Ray reserves for one rank, or for one engine, of a role; less than 1 if they are shared."""
        if self.device == "cpu":
            return 0.0
        if role in self.sharing:  # rounded down, so that the parts are no more than the whole
            return math.floor(1000 / max(_FEW, len(self.sharing))) / 1000
        return float(self.tensor_parallel if role == "rollout" else 1)


# --- numbers ---------------------------------------------------------------------------------------------------------
def placement(config: JobConfig) -> Placement:
    """Return the placement of a config: `cluster.*`, with defaults for the keys that are null."""
    on_cpu, tensor_parallel, most = config.device == "cpu", 1, 0
    colocate: Colocation = "separate"
    if isinstance(config, SupervisedConfig):  # its ranks have GPUs of their own
        sizes = {config.role: config.world_size}
    else:
        assert isinstance(config, RunConfig)
        tensor_parallel = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        colocate = _colocate(config, tensor_parallel)
        sizes = _sizes(config, tensor_parallel, colocate)
        most = config.cluster.max_rollout_world_size or 0
    shares = {role: role != "actor" and colocate in row.shares for role, row in table_of(config).items()}
    return Placement(
        device=config.device,
        world_sizes=sizes,
        tensor_parallel=tensor_parallel,
        colocate=colocate,
        num_devices=config.trainer.nnodes if on_cpu else sum(n for role, n in sizes.items() if not shares[role]),
        num_cpus_per_worker=config.cluster.num_cpus_per_worker or (CPU_SHARE if on_cpu else 1.0),
        num_threads=_threads(config, {role: size for role, size in sizes.items() if size}),
        extra_engines=max(most - sizes.get("rollout", most), 0) // tensor_parallel,
    )


def _colocate(config: RunConfig, tensor_parallel: int) -> Colocation:
    """Return the roles that share GPUs: all of them if an engine leaves no GPU for the actor."""
    if config.device == "cpu":
        return "separate"
    if config.cluster.colocate is not None:
        return config.cluster.colocate
    if config.num_gpus in (1, tensor_parallel):
        return "all"
    followers = _followers(config).values()
    return "actor_ref" if followers and not any(followers) else "separate"


def _followers(config: RunConfig) -> dict[str, int | None]:
    return {row.name: value_of(config, row.size_key) for row in roles_of(config) if row.follows}


def _sizes(config: RunConfig, tensor_parallel: int, colocate: Colocation) -> dict[str, int]:
    """Return the number of processes by role; roles that the run lacks have 0."""
    asked, wanted = config.cluster, _followers(config)
    apart: dict[str, int] = {}  # followers that have GPUs, or a share of the cores, of their own
    if config.device == "cpu":
        # 2 for the built-in model, whose matrices are too small for two threads to help. A larger model gets 1: several
        # ranks on one machine copy weights to each other, while threads share them.
        usual = max(2 if config.has_builtin_model else 1, config.sequence_parallel_size("actor"))
        actor, rollout = asked.actor_world_size or usual, asked.rollout_world_size or tensor_parallel
        apart = {role: size or config.sequence_parallel_size(role) for role, size in wanted.items()}
        apart = {role: size for role, size in apart.items() if not ROLES[role].trains}
    elif colocate == "all":
        actor = asked.actor_world_size or config.num_gpus
        rollout = asked.rollout_world_size or max(actor // tensor_parallel, 1) * tensor_parallel
    else:
        if colocate == "separate":
            apart = {role: size or config.sequence_parallel_size(role) for role, size in wanted.items()}
        actor, rollout, left = _split(config, tensor_parallel, sum(apart.values()))
        if open_ended := [role for role in apart if wanted[role] is None]:
            apart[open_ended[0]] += left
    absent = {role: 0 for role, row in ROLES.items() if row.follows}
    return {
        "actor": actor,
        "rollout": rollout,
        **absent,
        **{role: size or actor for role, size in wanted.items()},
    } | apart


def _split(config: RunConfig, tensor_parallel: int, least: int) -> tuple[int, int, int]:
    """GPUs of the actor, of the engines, and that are left, beside `least` of other roles; their sum exceeds those that
    there are if they are few.
    """
    asked, gpus = config.cluster, config.num_gpus
    room = min(gpus // 2, gpus - (asked.rollout_world_size or tensor_parallel) - least)
    actor = asked.actor_world_size or 1 << (max(room, 1).bit_length() - 1)  # a power of two
    rest = gpus - actor - least
    rollout = asked.rollout_world_size or max(rest // tensor_parallel * tensor_parallel, tensor_parallel)
    return actor, rollout, max(rest - rollout, 0)


def _threads(config: JobConfig, processes: Mapping[str, int]) -> dict[str, int]:
    """Compute threads per process of each role. Roles take turns, so the processes of one role share all cores.

    The reference overlaps with generation, but gets all cores too: it has little work then, and runs alone afterwards.
    The built-in model uses one thread: its matrices are too small to be worth splitting.
    """
    asked, nodes = config.cluster.num_threads_per_worker, config.trainer.nnodes
    if asked is not None or config.device != "cpu" or config.has_builtin_model:
        return dict.fromkeys(processes, asked or 1)
    cores = physical_cores()
    return {role: max(1, min(cores, cores * nodes // max(number, 1))) for role, number in processes.items()}


# --- machines --------------------------------------------------------------------------------------------------------
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
    cpus, sizes = place.num_cpus_per_worker, {"rollout": place.tensor_parallel}
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
    extra = [
        Slot(0, needs["rollout"][1], (Seat("rollout", rank, *needs["rollout"]),), required=False)
        for rank in range(place.num_engines, place.num_engines + place.extra_engines)
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
    processes, free = [0] * machines, [config.trainer.n_gpus_per_node] * machines
    copy = copy_size(config, place)
    # a replica larger than a machine takes whole machines (by a rule), and the actor starts on the first one
    sizes = {"actor": copy if copy is not None and copy <= free[0] else 1, "rollout": place.tensor_parallel}
    homes: Homes = {}
    for role, ranks in place.world_sizes.items():
        size = sizes.get(role, 1)  # GPUs of a unit that must not be split across machines
        count = place.num_engines if role == "rollout" else ranks // size
        if count == 0:
            continue
        if place.device == "cpu":
            homes[role] = spread(count, processes)
        elif role == "actor":
            homes[role] = tuple(home for home in fill(count, size, free) for _ in range(size))
        elif role in place.sharing:  # on the first of the actor's GPUs that it shares
            homes[role] = homes["actor"][: count * size : size]
        else:
            homes[role] = fill(count, size, free)
    if place.device == "cuda":
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
