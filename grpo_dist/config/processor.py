"""What the processor of this machine has. The driver's stands for all machines of a cluster."""

from __future__ import annotations

import math
import os
import re
from functools import cache
from pathlib import Path

# Flags of instructions that multiply bf16: Intel and AMD, and Arm.
BF16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}


@cache
def has_bf16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Whether matrix products in bf16 are faster than in fp32; without such instructions they are far slower."""
    try:
        flags = re.search(r"^(?:flags|Features)\s*:(.*)$", Path(cpuinfo).read_text(), re.MULTILINE)
    except OSError:
        return False
    return flags is not None and not BF16_FLAGS.isdisjoint(flags[1].split())


@cache
def physical_cores() -> int:
    """Cores that this process may use; hyperthreads of a core, which share its arithmetic, count once."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    try:
        files = (Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus)
        cores = len({file.read_text() for file in files})
    except OSError:
        cores = len(cpus)
    return max(1, min(cores, _cgroup_cores()))


def _cgroup_cores() -> int:
    """A container's limit; many where there is none."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # "max" is no number
        return 1 << 20
