"""Checks the resources of this machine before the run starts a local Ray cluster on it.

Of a running cluster only its address is checked; its resources are known only once Ray has connected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_dist.config.processor import logical_cpus, memory_gib
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.engines.vllm.installed import build_problem
from grpo_dist.errors import ConfigError
from grpo_dist.plan.placement import Slot
from grpo_dist.runtime.cluster import LOCAL, find_cluster
from grpo_dist.sizes import GIB


@dataclass(frozen=True)
class Machine:
    """The machine or cluster that a run will use.

    Attributes:
        gpu_gib: memory of the smallest GPU, GiB; None: unknown, or there is no GPU.
        host_gib: CPU memory, GiB; None: unknown.
    """

    description: str
    gpu_gib: float | None
    host_gib: float | None = None


def check_machine(config: JobConfig, slots: Sequence[Slot]) -> Machine:
    """Find the Ray cluster, or on this machine the CPUs and GPUs that a local one would need.

    Raises:
        ConfigError: no cluster answers, there are too few CPUs or GPUs, or torch or vLLM is built for another device.
    """
    address = find_cluster(config.ray_kwargs.ray_init.address)
    if address != LOCAL:
        return Machine(f"the Ray cluster at {address}", config.cluster.gpu_memory_gib if config.num_gpus else None)
    if problem := build_problem(config.device):
        alone = "trainer.dry_run=config checks only the config"
        raise ConfigError(f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: {problem}; {alone}")
    gpus = gpu_memory_gib() if config.num_gpus else []
    if config.num_gpus > len(gpus):
        raise ConfigError(
            f"trainer.nnodes={config.trainer.nnodes}, trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: this "
            f"machine has {len(gpus)} GPUs, and the run would start Ray on it; set them to what it has (0: train on "
            "CPU), or ray_kwargs.ray_init.address to a cluster; trainer.dry_run=config checks only the config"
        )
    _check_cpus(config, slots)
    if not gpus:
        return Machine(f"{logical_cpus()} CPUs, {memory_gib():.3g} GiB", None, memory_gib())
    description = f"{len(gpus)} GPUs, {min(gpus):.3g} GiB each; {memory_gib():.3g} GiB of CPU memory"
    return Machine(description, config.cluster.gpu_memory_gib or min(gpus), memory_gib())


def gpu_memory_gib() -> list[float]:
    """Memory of each GPU that this process may use, GiB."""
    import torch

    count = torch.cuda.device_count()
    return [torch.cuda.get_device_properties(number).total_memory / GIB for number in range(count)]


def _check_cpus(config: JobConfig, slots: Sequence[Slot]) -> None:
    """Check that the logical CPUs that all processes request exist: Ray would wait for them for ever."""
    asked = config.ray_kwargs.ray_init.num_cpus
    available = asked or logical_cpus()
    slots = [slot for slot in slots if slot.required]
    needed = sum(slot.num_cpus for slot in slots)
    if needed > available + 1e-6:
        seats = [seat for slot in slots for seat in slot.seats]
        setting = f"cluster.num_cpus_per_worker={min(seat.num_cpus for seat in seats):g}"
        sizes = "cluster.*, reward.num_workers" if any(seat.role == "reward" for seat in seats) else "cluster.*"
        have = f"ray_kwargs.ray_init.num_cpus={asked}" if asked else f"this machine has {available}"
        raise ConfigError(
            f"{setting}: the processes of all roles request {needed:g} logical CPUs from Ray, but {have}; lower it, "
            f"or the numbers of processes ({sizes})"
        )
