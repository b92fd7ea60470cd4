"""Whole runs of a command on real workers, with faults or without."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.driver import Fault
from tests.observed import assert_gone
from tests.records import json_lines

STEPS, STEPS_PER_EPOCH = 7, 3
# Each step is saved, and the whole run survives many faults.
_COMMON = [
    *("data.train_batch_size=4", f"data.train_max_samples={4 * STEPS_PER_EPOCH}", "data.val_max_samples=16"),
    *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=null"),
    *("trainer.max_actor_restarts=12", "trainer.worker_timeout_s=25", "ray_kwargs.ray_init.address=local"),
]
SETTINGS = [
    *("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=4"),
    *(f"trainer.test_freq={STEPS}", "trainer.max_worker_restarts=12", "reward.timeout_s=5", *_COMMON),
]
SUPERVISED = [*_COMMON, "trainer.test_freq=1"]  # of the commands that train one model
MOST_LIVES = 8
# SIGKILL of the driver, and SIGTERM: the run is started again. Anything else is a failure.
RESTARTED = (-signal.SIGKILL, 128 + signal.SIGTERM)


@dataclass
class Outcome:
    """What became of a run: its files, how often it was started, what it said, and how long it took."""

    run_dir: Path
    lives: int
    log: str
    seconds: float
    hits: list[dict[str, Any]]

    @property
    def weights(self) -> bytes:
        return (self.run_dir / "huggingface" / "model.safetensors").read_bytes()

    def metrics(self) -> list[dict[str, Any]]:
        return json_lines(self.run_dir / "metrics.jsonl")

    def samples(self, step: int) -> list[dict[str, Any]]:
        """What was sampled in a step, by prompt."""
        return sorted(json_lines(self.run_dir / "rollouts" / f"{step}.jsonl"), key=lambda row: row["uid"])

    def rewards(self) -> list[tuple[int, float]]:
        return self.curve("critic/score/mean")

    def curve(self, name: str) -> list[tuple[int, float]]:
        """A metric by step."""
        return [(row["step"], row[name]) for row in self.metrics() if name in row]


def train(folder: Path, faults: list[Fault], *overrides: str) -> Outcome:
    """A run of the main job to its end, started again whenever a fault ended it."""
    return run_command("main", folder, faults, *SETTINGS, *overrides)


def run_command(name: str, folder: Path, faults: list[Fault], *overrides: str) -> Outcome:
    """A run of a command to its end, started again whenever a fault ended it."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "plan.json"
    plan.write_text(json.dumps([asdict(fault) for fault in faults]))
    command = [sys.executable, "-m", "tests.chaos.driver", str(plan), name, *overrides]
    command.append(f"trainer.default_local_dir={folder}/run")
    started, log = time.monotonic(), ""
    for lives in range(1, MOST_LIVES + 1):
        before = ray_processes()
        # in a process group of its own, since SIGTERM goes to all of it
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=1500, check=False, start_new_session=True
        )
        log += done.stderr + done.stdout
        if done.returncode == 0:
            return Outcome(folder / "run", lives, log, time.monotonic() - started, hits_of(plan))
        assert done.returncode in RESTARTED, log[-6000:]
        # Ray's agents look for a raylet that was not shut down about once a minute
        assert_gone(ray_processes() - before, within_s=60 if done.returncode > 0 else 120)
    raise AssertionError(f"it did not come to its end:\n{log[-6000:]}")


def hits_of(plan: Path) -> list[dict[str, Any]]:
    """The faults of a plan that have hit."""
    hits = plan.with_suffix(".hits")
    return [json.loads(hit) for hit in hits.read_text().splitlines()] if hits.exists() else []


def saved(driver: subprocess.Popen[str], run_dir: Path) -> Path:
    """Wait for a run's first checkpoint; returns the file that names the last one."""
    pointer, deadline = run_dir / "latest_checkpointed_iteration.txt", time.monotonic() + 300
    while not pointer.exists():
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return pointer


def ray_processes() -> set[psutil.Process]:
    """Ray's own processes and its workers, of all runs on this machine."""
    found = set()
    for process in psutil.process_iter(["name", "cmdline"]):
        command = " ".join(process.info["cmdline"] or [process.info["name"] or ""])
        if command.startswith("ray::") or "/raylet" in command or "/gcs_server" in command:
            found.add(process)
    return found
