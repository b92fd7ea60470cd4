"""What every benchmark writes besides its tables, and how it prints them.

A record is a JSON object: `machine`, `commit`, `dirty`, `command`, the benchmark's own tables, and `ratios`, numbers by
name. Seconds differ between machines and hours, ratios of things that were measured in turns much less: only ratios are
compared with those of other commits (regressions.py), and of all of them higher is better.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from grpo_dist.config.processor import cpu_flags, has_bf16

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, load, GPU and versions."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": [round(load, 2) for load in os.getloadavg()],
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def capability() -> str:
    """What ratios depend on most: the instructions that the processor has, and the GPU."""
    kind = torch.backends.cpu.get_cpu_capability()
    kind += "_AMX" if "amx_bf16" in cpu_flags() else "_BF16" if has_bf16() else ""
    return f"{kind}, {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else kind


def begun() -> dict[str, Any]:
    """The head of a record, taken before anything is measured, since it tells the machine's load."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    command = shlex.join(["python", *sys.orig_argv[1:]])
    return {
        "machine": machine(),
        "commit": commit,
        "dirty": None if changes is None else bool(changes),
        "command": command,
    }


def write(path: Path, record: dict[str, Any], ratios: dict[str, float]) -> None:
    """The record as JSON.

    Args:
        path: of the file; its folder is made.
        record: what `begun` returned, and the benchmark's tables.
        ratios: by names that no other benchmark uses; higher is better.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record | {"ratios": ratios}, indent=2) + "\n")


def table(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """Rows with equal keys, in columns."""
    cells = [list(rows[0]), *([_shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([title, *lines, ""])


def _shown(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:,.0f}"
        if isinstance(value, int | float)
        else str(value)
    )


def _git(*arguments: str) -> str | None:
    """What git says of this checkout; None where there is no git or no checkout."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
