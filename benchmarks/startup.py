"""Where the seconds of a start go: `python -m benchmarks.startup`, from the command to the first training step.

Starts the quickstart's command for one step, several times, and notes when it says what, and how much processor time
each of its processes has had when the workers are ready. Processor seconds over cores are what no order of things can
beat.
Further arguments go to the command.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks import record

COMMAND = ("-m", "grpo_dist.main", "algorithm.adv_estimator=grpo", "trainer.total_training_steps=1")
# What the command says first when something has been done, and what that is.
SIGNS = {
    "started a local Ray": "checks of the config, Ray",
    "starting workers": "workers asked for",
    "workers ready": "workers ready",
    "step 0/": "first weights synced, validation",
    "step 1/": "first training step",
}
ROLES = ("RolloutWorker", "ActorWorker", "PolicyWorker", "RewardWorker", "raylet", "gcs_server")
OTHERS = "other processes of Ray and of the reward function"


def start(arguments: list[str], folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """One start: seconds from the command to each sign, and processor seconds by process at the third one."""
    began, said, used = time.perf_counter(), {}, {}
    command = [sys.executable, *COMMAND, f"trainer.default_local_dir={folder}", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            for sign, name in SIGNS.items():
                if line.startswith(sign) and name not in said:
                    said[name] = time.perf_counter() - began
                    if sign == "workers ready":
                        used = processor_seconds(psutil.Process(process.pid))
    if process.returncode or len(said) < len(SIGNS):
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}, after {', '.join(said) or 'nothing'}")
    return said, used


def processor_seconds(driver: psutil.Process) -> dict[str, float]:
    """Processor seconds so far of the driver and of each kind of process that it has started."""
    found = {"driver": sum(driver.cpu_times()[:2])}
    for process in driver.children(recursive=True):
        try:
            line = " ".join(process.cmdline())
            seconds = sum(process.cpu_times()[:2])
        except psutil.Error:
            continue
        role = next((role for role in ROLES if role in line), OTHERS)
        found[role] = found.get(role, 0.0) + seconds
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/startup.json"))
    parser.add_argument("--rounds", type=int, default=3)
    options, arguments = parser.parse_known_args()
    result: dict[str, Any] = record.begun()
    runs = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(start(arguments, Path(folder)))
    said = {name: median(run[0][name] for run in runs) for name in runs[0][0]}
    ends = list(said.values())
    result["timeline"] = [
        {"until": name, "seconds": end, "of them": end - before}
        for (name, end), before in zip(said.items(), [0.0, *ends], strict=False)
    ]
    names = dict.fromkeys(name for _, used in runs for name in used)
    used = {name: median(run[1].get(name, 0.0) for run in runs) for name in names}
    cores = len(os.sched_getaffinity(0))
    rows = [{"process": name, "processor seconds": seconds} for name, seconds in used.items()]
    total = sum(used.values())
    result["processes"] = [
        *rows,
        {"process": f"all; over {cores} cores {total / cores:.1f}", "processor seconds": total},
    ]
    for name in ("timeline", "processes"):
        print(record.table(name, result[name]))
    last = said[SIGNS["step 1/"]]
    record.write(options.output, result, {"startup/processor seconds over cores, of the seconds": total / cores / last})
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
