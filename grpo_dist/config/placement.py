"""How many processes each role gets, and on what. `cluster.*` decides; nulls are filled in here.

Without GPUs: 2 actor ranks for the built-in model and 1 for larger ones, 1 engine, 1 reference, sharing the CPU cores.
On one GPU: one process of each role, sharing it. On more: about half of the GPUs train, most of the others generate,
the rest hold the reference. Nothing is checked here: rules.py compares the result with the machines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_dist.config.processor import physical_cores
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_roles import Device

# Logical CPUs for Ray's book-keeping: ten processes fit on one core, so all roles fit on a laptop's Ray node.
_CPU_SHARE = 0.1


@dataclass(frozen=True)
class Placement:
    """Processes of each role and what each of them gets.

    Args:
        device: "cpu" or "cuda".
        actor_world_size: actor processes.
        rollout_world_size: engines * tensor_parallel.
        tensor_parallel: GPUs per engine, or processes on CPU.
        ref_world_size: reference processes; 0 where none is needed.
        num_devices: GPUs that the three roles hold together; on CPU the machines, whose cores they share.
        gpus_per_worker: GPUs that Ray reserves for one process; below 1 where roles share a GPU.
        num_cpus_per_worker: logical CPUs that Ray reserves for one process.
        num_threads: compute threads of one process on CPU, by role.
    """

    device: Device
    actor_world_size: int
    rollout_world_size: int
    tensor_parallel: int
    ref_world_size: int
    num_devices: int
    gpus_per_worker: float
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
    def world_size(self) -> int:
        """Processes of the three roles together."""
        return sum(self.world_sizes.values())

    @property
    def shares_gpu(self) -> bool:
        """Whether all roles live on one GPU."""
        return 0 < self.gpus_per_worker < 1


def placement(config: RunConfig) -> Placement:
    """Fill in `cluster.*`; set values win over the sensible ones."""
    asked, gpus = config.cluster, config.num_gpus
    tensor_parallel = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    on_cpu = config.device == "cpu"
    if on_cpu or gpus == 1:
        actor = asked.actor_world_size or (_cpu_actors(config) if on_cpu else 1)
        rollout = asked.rollout_world_size or tensor_parallel
        ref = (asked.ref_world_size or 1) if config.needs_reference_workers else 0
    else:
        actor, rollout, ref = _split(config, gpus, tensor_parallel)
    roles = 2 + (ref > 0)
    per_worker = 0.0 if on_cpu else 1.0 if gpus > 1 else math.floor(100 / roles) / 100
    return Placement(
        device=config.device,
        actor_world_size=actor,
        rollout_world_size=rollout,
        tensor_parallel=tensor_parallel,
        ref_world_size=ref,
        num_devices=config.trainer.nnodes if on_cpu else 1 if gpus == 1 else actor + rollout + ref,
        gpus_per_worker=per_worker,
        num_cpus_per_worker=asked.num_cpus_per_worker or (_CPU_SHARE if on_cpu else 1.0),
        num_threads=_threads(config, {"actor": actor, "rollout": rollout, "ref": ref}),
    )


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


def _split(config: RunConfig, gpus: int, tensor_parallel: int) -> tuple[int, int, int]:
    """Actor, rollout and reference GPUs; more than there are where they cannot be split."""
    asked = config.cluster
    least_ref = (asked.ref_world_size or 1) if config.needs_reference_workers else 0
    least_rollout = asked.rollout_world_size or tensor_parallel
    room = min(gpus // 2, gpus - least_rollout - least_ref)
    actor = asked.actor_world_size or _power_of_two(room)
    rest = gpus - actor
    multiple = (rest - least_ref) // tensor_parallel * tensor_parallel
    rollout = asked.rollout_world_size or max(multiple, tensor_parallel)
    if not config.needs_reference_workers:
        return actor, rollout, 0
    return actor, rollout, asked.ref_world_size or max(rest - rollout, 1)


def _power_of_two(most: int) -> int:
    """The largest power of two that is at most `most`, and at least 1."""
    return 1 << (max(most, 1).bit_length() - 1)
