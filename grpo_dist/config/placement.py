"""How many processes each role gets, and on what. `cluster.*` decides; nulls are filled in here.

Without GPUs: 2 actor ranks for the built-in model and 1 for larger ones, 1 engine, 1 reference, sharing the CPU cores.
With GPUs `cluster.colocate` says which roles share them. "actor_ref": about half of the GPUs train, each with a rank of
the reference beside the actor's, and the others generate. "all": each GPU trains, generates and holds the reference; so
it is on one GPU, and where an engine leaves no other. "separate": every process has GPUs of its own. Nothing is checked
here: rules.py compares the result with the machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_dist.config.processor import physical_cores
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_roles import Colocation, Device

# Logical CPUs for Ray's book-keeping: ten processes fit on one core, so all roles fit on a laptop's Ray node.
_CPU_SHARE = 0.1
# Of a GPU, for Ray's book-keeping, for a process that shares one: the three of all roles fit.
_GPU_SHARE = 0.3
# Roles that share the actor's GPUs.
_SHARING: Mapping[Colocation, tuple[str, ...]] = {
    "separate": (),
    "actor_ref": ("actor", "ref"),
    "all": ("actor", "rollout", "ref"),
}


@dataclass(frozen=True)
class Placement:
    """Processes of each role and what each of them gets.

    Args:
        device: "cpu" or "cuda".
        actor_world_size: actor processes.
        rollout_world_size: engines * tensor_parallel.
        tensor_parallel: GPUs per engine, or processes on CPU.
        ref_world_size: reference processes; 0 where none is needed.
        colocate: which roles share GPUs; "separate" on CPU.
        num_devices: GPUs that the three roles hold together; on CPU the machines, whose cores they share.
        num_cpus_per_worker: logical CPUs that Ray reserves for one process.
        num_threads: compute threads of one process on CPU, by role.
    """

    device: Device
    actor_world_size: int
    rollout_world_size: int
    tensor_parallel: int
    ref_world_size: int
    colocate: Colocation
    num_devices: int
    num_cpus_per_worker: float
    num_threads: Mapping[str, int]

    @property
    def num_engines(self) -> int:
        """Rollout engines."""
        return max(1, self.rollout_world_size // self.tensor_parallel)

    @property
    def world_sizes(self) -> dict[str, int]:
        """By role its processes, one GPU each unless shared; those of all engines together."""
        return {"actor": self.actor_world_size, "rollout": self.rollout_world_size, "ref": self.ref_world_size}

    @property
    def shares_gpu(self) -> bool:
        """Whether engines and actor ranks share GPUs."""
        return self.colocate == "all"

    @property
    def sharing(self) -> tuple[str, ...]:
        """The roles whose processes share GPUs, the actor's; none where it has them for itself."""
        roles = tuple(role for role in _SHARING[self.colocate] if self.world_sizes[role])
        return roles if len(roles) > 1 else ()

    def num_gpus(self, role: str) -> float:
        """GPUs that Ray reserves for one process of a role, an engine being one; below 1 where it shares them."""
        if self.device == "cpu":
            return 0.0
        return _GPU_SHARE if role in self.sharing else float(self.tensor_parallel if role == "rollout" else 1)


def placement(config: RunConfig) -> Placement:
    """Fill in `cluster.*`; set values win over the sensible ones."""
    asked, gpus = config.cluster, config.num_gpus
    tensor_parallel = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    colocate = _colocate(config, tensor_parallel)
    if config.device == "cpu":
        actor = asked.actor_world_size or _cpu_actors(config)
        rollout, ref = asked.rollout_world_size or tensor_parallel, asked.ref_world_size or 1
    elif colocate == "all":
        actor = asked.actor_world_size or gpus
        rollout = asked.rollout_world_size or max(actor // tensor_parallel, 1) * tensor_parallel
        ref = asked.ref_world_size or actor
    else:
        actor, rollout, ref = _split(config, gpus, tensor_parallel, colocate)
    sizes = {"actor": actor, "rollout": rollout, "ref": ref if config.needs_reference_workers else 0}
    own = sum(size for role, size in sizes.items() if role == "actor" or role not in _SHARING[colocate])
    return Placement(
        device=config.device,
        actor_world_size=actor,
        rollout_world_size=rollout,
        tensor_parallel=tensor_parallel,
        ref_world_size=sizes["ref"],
        colocate=colocate,
        num_devices=config.trainer.nnodes if config.device == "cpu" else own,
        num_cpus_per_worker=asked.num_cpus_per_worker or (_CPU_SHARE if config.device == "cpu" else 1.0),
        num_threads=_threads(config, sizes),
    )


def _colocate(config: RunConfig, tensor_parallel: int) -> Colocation:
    """Which roles share GPUs: all of them where there is none for an actor rank beside an engine."""
    asked, gpus = config.cluster, config.num_gpus
    if config.device == "cpu":
        return "separate"
    if asked.colocate is not None:
        return asked.colocate
    if gpus == 1 or gpus == tensor_parallel:
        return "all"
    return "actor_ref" if config.needs_reference_workers and asked.ref_world_size is None else "separate"


def _cpu_actors(config: RunConfig) -> int:
    """Actor ranks on CPU. A small model gains by a second rank: its matrices are too small for two threads.

    A larger one loses: ranks on one machine only copy weights to each other, where threads share them.
    """
    return 2 if config.actor_rollout_ref.model.is_builtin else 1


def _threads(config: RunConfig, processes: Mapping[str, int]) -> dict[str, int]:
    """Compute threads of a process of each role: a phase belongs to one role, whose processes share a node's cores.

    The reference computes while the engines still generate. Its share is a whole one all the same: it has little to do
    then, and the cores to itself afterwards. A small model takes one thread everywhere: sharing out its matrices costs
    more than computing them.
    """
    asked, nodes = config.cluster.num_threads_per_worker, config.trainer.nnodes
    if asked is not None or config.device != "cpu" or config.actor_rollout_ref.model.is_builtin:
        return dict.fromkeys(processes, asked or 1)
    cores = physical_cores()
    return {role: max(1, min(cores, cores * nodes // max(number, 1))) for role, number in processes.items()}


def _split(config: RunConfig, gpus: int, tensor_parallel: int, colocate: Colocation) -> tuple[int, int, int]:
    """Actor, rollout and reference GPUs; more than there are where they cannot be split."""
    asked = config.cluster
    apart = config.needs_reference_workers and colocate == "separate"
    least_ref = (asked.ref_world_size or 1) if apart else 0
    least_rollout = asked.rollout_world_size or tensor_parallel
    room = min(gpus // 2, gpus - least_rollout - least_ref)
    actor = asked.actor_world_size or _power_of_two(room)
    rest = gpus - actor
    multiple = (rest - least_ref) // tensor_parallel * tensor_parallel
    rollout = asked.rollout_world_size or max(multiple, tensor_parallel)
    return actor, rollout, asked.ref_world_size or (max(rest - rollout, 1) if apart else actor)


def _power_of_two(most: int) -> int:
    """The largest power of two that is at most `most`, and at least 1."""
    return 1 << (max(most, 1).bit_length() - 1)
