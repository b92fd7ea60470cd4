"""Decides how many processes, GPUs and CPUs each role gets: `cluster.*`, with a default for every null.

Without GPUs: 2 actor ranks for the built-in model and 1 for larger ones, as many of other roles that train, and 1
process of each other role, sharing the CPU cores. With GPUs `cluster.colocate` says which roles share them.
"actor_ref": about half of the GPUs run the actor and the roles that may lie beside it, and the others generate. "all":
each GPU runs all roles; the default on one GPU, and if one engine needs all GPUs. "separate": no GPU is shared. Nothing
is checked here: placement_rules.py compares the result with the machines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_dist.config.problems import value_of
from grpo_dist.config.processor import physical_cores
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.config.schema_roles import Colocation, Device
from grpo_dist.plan.roles import ROLES, roles_of, table_of

SEPARATE: Colocation = "separate"  # no roles share GPUs
# Logical CPUs that Ray reserves per process on CPU: small, so that all roles fit on a laptop.
CPU_SHARE = 0.1
# Up to so many processes that share a GPU get equal parts of it from Ray, however many there are.
_FEW = 5


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


def placement(config: JobConfig) -> Placement:
    """Return the placement of a config: `cluster.*`, with defaults for the keys that are null."""
    on_cpu, tensor_parallel, colocate, most = config.device == "cpu", 1, SEPARATE, 0
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


def _sizes(config: RunConfig, tensor_parallel: int, colocate: Colocation) -> dict[str, int]:
    """Return the number of processes by role; roles that the run lacks have 0."""
    asked, wanted = config.cluster, _followers(config)
    if config.device == "cpu":
        # 2 for the built-in model, whose matrices are too small for two threads to help. A larger model gets 1: several
        # ranks on one machine copy weights to each other, while threads share them.
        usual = max(2 if config.has_builtin_model else 1, config.sequence_parallel_size("actor"))
        actor = asked.actor_world_size or usual
        rollout = asked.rollout_world_size or tensor_parallel
        followers = {
            role: size or (actor if ROLES[role].trains else config.sequence_parallel_size(role))
            for role, size in wanted.items()
        }
    elif colocate == "all":
        actor = asked.actor_world_size or config.num_gpus
        rollout = asked.rollout_world_size or max(actor // tensor_parallel, 1) * tensor_parallel
        followers = {role: size or actor for role, size in wanted.items()}
    else:
        actor, rollout, followers = _split(config, config.num_gpus, tensor_parallel, colocate)
    absent = {role: 0 for role, row in ROLES.items() if row.follows}
    return {"actor": actor, "rollout": rollout, **absent, **followers}


def _colocate(config: RunConfig, tensor_parallel: int) -> Colocation:
    """Return the roles that share GPUs: all of them if an engine leaves no GPU for the actor."""
    asked, gpus = config.cluster, config.num_gpus
    if config.device == "cpu":
        return "separate"
    if asked.colocate is not None:
        return asked.colocate
    if gpus == 1 or gpus == tensor_parallel:
        return "all"
    followers = _followers(config).values()
    return "actor_ref" if followers and not any(followers) else "separate"


def _followers(config: RunConfig) -> dict[str, int | None]:
    return {row.name: value_of(config, row.size_key) for row in roles_of(config) if row.follows}


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


def _split(config: RunConfig, gpus: int, tensor_parallel: int, colocate: Colocation) -> tuple[int, int, dict[str, int]]:
    """GPUs of the actor, of the engines and of each follower; their sum exceeds those that there are if they are few.

    Of followers with GPUs of their own, the first whose size is not set gets what is left.
    """
    asked, wanted = config.cluster, _followers(config)
    least_of = {role: size or config.sequence_parallel_size(role) for role, size in wanted.items()}
    apart = least_of if colocate == "separate" else {}
    least = sum(apart.values())
    room = min(gpus // 2, gpus - (asked.rollout_world_size or tensor_parallel) - least)
    actor = asked.actor_world_size or 1 << (max(room, 1).bit_length() - 1)  # a power of two
    rest = gpus - actor - least
    rollout = asked.rollout_world_size or max(rest // tensor_parallel * tensor_parallel, tensor_parallel)
    if open_ended := [role for role in apart if wanted[role] is None]:
        apart[open_ended[0]] += max(rest - rollout, 0)
    return actor, rollout, {role: size or actor for role, size in wanted.items()} | apart
