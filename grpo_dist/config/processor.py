"""The CPU and the kernel of this machine. The driver's are taken to be those of all machines of a cluster."""

from __future__ import annotations

import math
import os
import re
from functools import cache
from pathlib import Path

# CPU flags of bf16 matrix instructions: Intel and AMD, and Arm.
BF16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}


@cache
def cpu_flags(cpuinfo: str = "/proc/cpuinfo") -> frozenset[str]:
    """The instruction sets of the CPU, by Linux' names; none where they are not known."""
    try:
        flags = re.search(r"^(?:flags|Features)\s*:(.*)$", Path(cpuinfo).read_text(), re.MULTILINE)
    except OSError:
        return frozenset()
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
    return max(1, min(cores, _cgroup_cores()))


def _cgroup_cores() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # "max" is no number
        return 1 << 20
