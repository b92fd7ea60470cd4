"""What nvidia-smi says of the GPU, and how calls on it are timed.

nvidia-smi needs no CUDA in the process that asks, so asking changes nothing.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def gpu_facts() -> dict[str, str]:
    """Name, driver and memory (MiB) of the GPU that torch would call cuda:0; empty if there is none."""
    values = _ask("name", "driver_version", "memory.total")
    return dict(zip(("gpu", "driver", "gpu_mib"), values, strict=True)) if values else {}


def used_gib() -> float | None:
    """Memory of the GPU that is taken, by whatever process; None if nvidia-smi does not say."""
    values = _ask("memory.used")
    return float(values[0]) / 1024 if values and values[0].replace(".", "").isdigit() else None


def _ask(*names: str) -> list[str]:
    """The first GPU's answers; a container may have the tool and no GPU, and then it fails."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if chosen in ("", "-1"):
        return []
    answer = _nvidia_smi(f"--id={chosen}", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
    return [value.strip() for value in answer.splitlines()[0].split(",")] if answer.strip() else []


def _nvidia_smi(*arguments: str) -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout if done.returncode == 0 else ""


def median_seconds(call: Callable[[], Any], device: str, *, rounds: int, warm_ups: int = 1) -> float:
    """Median time of a call after some that do not count: between two events on a GPU, on the clock on CPU."""
    for _ in range(warm_ups):
        call()
    return statistics.median(_seconds(call, device) for _ in range(rounds))


def _seconds(call: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def host_gib(name: str) -> float:
    """This process's CPU memory: "VmRSS" now, "VmHWM" its peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**20


def forget_host_peak() -> bool:
    """Begin the peak of CPU memory anew; False where the kernel does not let us: it is then the whole process's."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return host_gib("VmHWM") <= host_gib("VmRSS") + 0.05
