"""What a sandbox costs a program: `python -m benchmarks.sandbox`, from its start to its end, beside one without.

Runs programs in turns as plain processes, in one sandbox that stays open, and in one that is opened for each. The
settings are `sandbox.KEY=VALUE`, such as sandbox.backend=docker sandbox.image=python:3.12.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from grpo_dist.plan.commands import load_config
from grpo_dist.sandbox import SandboxSettings, open_sandbox

PROGRAMS = {"true": ["true"], "python": [sys.executable, "-c", "print(42)"]}


def seconds(run: Callable[[], int]) -> float:
    """How long a program takes that must end well."""
    begun = time.perf_counter()
    assert run() == 0
    return time.perf_counter() - begun


def measured(command: Sequence[str], settings: SandboxSettings, count: int) -> dict[str, list[float]]:
    """Seconds of each start, by the way in which it is made."""

    def alone() -> int:
        with open_sandbox(settings) as sandbox:
            return sandbox.exec(command).exit_code

    with open_sandbox(settings) as kept:
        ways: dict[str, Callable[[], int]] = {
            "plain process": lambda: subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL).returncode,
            "sandbox": lambda: kept.exec(command).exit_code,
            "sandbox of its own": alone,
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(count):
            for name, run in ways.items():
                found[name].append(seconds(run))
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/sandbox.json"))
    parser.add_argument("--count", type=int, default=1000, help="starts of each program in each way (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="sandbox.KEY=VALUE")
    options = parser.parse_args()
    config, _ = load_config(options.overrides)
    settings, result, ratios = SandboxSettings(**config.sandbox.model_dump()), record.begun(), {}
    rows: list[dict[str, Any]] = []
    for program, command in PROGRAMS.items():
        found = measured(command, settings, options.count)
        for name, times in found.items():
            middle, high = np.percentile(np.array(times) * 1000, (50, 95))
            rows.append({"program": program, "as": name, "p50 ms": float(middle), "p95 ms": float(high)})
        ratios[f"sandbox/{program}: a plain process over one in a sandbox, p50"] = float(
            np.median(found["plain process"]) / np.median(found["sandbox"])
        )
    result["starts"] = rows
    print(record.table(f"{options.count} starts to the end, {settings.backend}, in turns", rows))
    record.write(options.output, result, ratios)
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
