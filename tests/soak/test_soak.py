"""A long run (most of an hour) leaks nothing: memory and open files of every role, processes and shared memory."""

import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
import pytest

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(4 * 3600)]
STEPS = 2000
# The first part of the run is for caches to fill; the last tenth is compared with the tenth after it.
WARM_UP = 0.3
# What memory may grow by between the two: a leak of one batch a step would be ten times that.
MOST_GROWTH, MOST_GROWTH_MIB = 0.05, 16.0
SETTINGS = [
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.optim.lr=1e-5",
    "data.val_max_samples=4",
    "trainer.total_epochs=1000",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=50",
    "trainer.test_freq=50",
    "ray_kwargs.ray_init.address=local",
]


def role_of(process: psutil.Process) -> str:
    """ "driver", a worker class, or the name of one of Ray's own processes."""
    command = process.cmdline()
    if command and command[0].startswith("ray::"):
        return command[0].removeprefix("ray::").partition(".")[0].partition("_")[0]
    return "driver" if "grpo_dist.main" in command else process.name()


def own_mib(pid: int) -> float:
    """MiB that a process has written; pages of libraries, which another run may map too, do not count."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
    return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:")) / 1024


def observe(run: psutil.Process) -> dict[str, float]:
    """MiB and open files by role, number of processes, and MiB of shared memory in use."""
    seen: dict[str, float] = defaultdict(float)
    for process in [run, *run.children(recursive=True)]:
        try:
            role = role_of(process)
            seen[f"{role} MiB"] += own_mib(process.pid)
            seen[f"{role} files"] += process.num_fds()
            seen["processes"] += 1
        except psutil.Error:
            continue
    seen["shared MiB"] = psutil.disk_usage("/dev/shm").used / 2**20
    return dict(seen)


def last_step(metrics: Path) -> int:
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    return json.loads(rows[-1])["step"] if rows else 0


def watch(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    """Run to the end; (step, what was seen) every few seconds."""
    command = [sys.executable, "-m", "grpo_dist.main", *SETTINGS, f"trainer.default_local_dir={run_dir}"]
    seen = []
    with (run_dir.parent / "log").open("w") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log)
        while run.poll() is None:
            time.sleep(5)
            step = last_step(run_dir / "metrics.jsonl")
            if step and run.poll() is None:
                seen.append((step, observe(psutil.Process(run.pid))))
    assert run.returncode == 0, (run_dir.parent / "log").read_text()[-3000:]
    return seen


def growth(seen: list[tuple[int, dict[str, float]]], name: str) -> tuple[float, float]:
    """Medians of the tenth after warming up, and of the last tenth."""

    def median(start: float, stop: float) -> float:
        return float(np.median([row.get(name, 0.0) for step, row in seen if start * STEPS <= step <= stop * STEPS]))

    return median(WARM_UP, WARM_UP + 0.1), median(0.9, 1.0)


def test_nothing_grows(tmp_path: Path) -> None:
    seen = watch(tmp_path / "run")
    rows = {name: growth(seen, name) for name in sorted({n for _, r in seen for n in r})}
    table = "\n".join(f"{name:40s} {early:10.1f} {late:10.1f}" for name, (early, late) in rows.items())
    sys.stdout.write(f"\n{table}\n")
    assert last_step(tmp_path / "run" / "metrics.jsonl") == STEPS
    for name, (early, late) in rows.items():
        allowed = early * (1 + MOST_GROWTH) + MOST_GROWTH_MIB if name.endswith("MiB") else early + 2
        assert late <= allowed, f"{name} grew from {early:.1f} to {late:.1f}\n{table}"
