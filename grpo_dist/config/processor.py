"""CPU, memory and kernel of this machine. The driver's are taken to be those of all machines of a cluster."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from grpo_dist.sizes import GIB

# CPU flags of bf16 matrix instructions: Intel and AMD, and Arm.
BF16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@cache
def cpu_flags(cpuinfo: str = "/proc/cpuinfo") -> frozenset[str]:
    """The instruction sets of the CPU, by Linux' names; none where they are not known."""
    flags = None
    with contextlib.suppress(OSError):
        flags = re.search(r"^(?:flags|Features)\s*:(.*)$", Path(cpuinfo).read_text(), re.MULTILINE)
    return frozenset() if flags is None else frozenset(flags[1].split())


def has_bf16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Tell if the CPU has bf16 matrix instructions; without them bf16 is far slower than fp32."""
    return not BF16_FLAGS.isdisjoint(cpu_flags(cpuinfo))


@cache
def is_wsl(version: str = "/proc/version") -> bool:
    """Tell if this is Linux under Windows (WSL), where processes cannot share the memory of a GPU: no CUDA IPC."""
    try:
        return "microsoft" in Path(version).read_text().lower()
    except OSError:
        return False


@cache
def physical_cores() -> int:
    """Physical cores that this process may use; the hyperthreads of a core count once."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    try:
        files = (Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus)
        cores = len({file.read_text() for file in files})
    except OSError:
        cores = len(cpus)
    return min(cores, logical_cpus())


def logical_cpus() -> int:
    """Logical CPUs that this process may use: those that it is bound to, or fewer where its CPU time is limited."""
    bound_to = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    times = _cgroup_limits("cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return min([bound_to, *(math.ceil(quota / period) for quota, period in times)])


def memory_gib() -> float:
    """CPU memory of this machine, or what this process's container or job may have of it, GiB."""
    limits = _cgroup_limits("memory", ("memory.max",), ("memory.limit_in_bytes",))
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *(limit for (limit,) in limits)]) / GIB


def _cgroup_limits(controller: str, *files: tuple[str, ...]) -> Iterator[list[int]]:
    """The numbers in these files (of version 2, of version 1) of this process's control groups and of all above them.

    A container's own group is the topmost folder that it sees, whatever path /proc has; jobs of Slurm lie deeper.
    """
    for line in OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        own = Path(CGROUPS, controller if controllers else "", path.lstrip("/"))
        for folder, names in itertools.product((own, *own.parents), files):
            with contextlib.suppress(OSError, ValueError):  # there is none, or it says "max"
                numbers = [int(word) for name in names for word in (folder / name).read_text().split()]
                if min(numbers) > 0:  # -1: no limit
                    yield numbers
