"""Whole runs, by the command in a process of its own or by its function, and what they leave in their folders."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_dist.main import main
from tests.records import json_lines

Rows = list[dict[str, Any]]
# For runs of which only what they train counts.
PLAIN = ("data.val_files=null", "trainer.save_freq=-1", "trainer.export_hf_model=false")
AGENT = "actor_rollout_ref.rollout.agent"


def sized(prompts: int, n: int | None = None) -> list[str]:
    """So many prompts in a step and in an optimizer step, with n responses each."""
    sizes = [f"data.train_batch_size={prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}"]
    return sizes if n is None else [*sizes, f"actor_rollout_ref.rollout.n={n}"]


def metrics(run_dir: Path) -> Rows:
    return json_lines(run_dir / "metrics.jsonl")


def steps(run_dir: Path) -> Rows:
    """The metrics of the steps, without the validation before them."""
    return [row for row in metrics(run_dir) if row["step"]]


def rollouts(run_dir: Path, step: int) -> Rows:
    return json_lines(run_dir / "rollouts" / f"{step}.jsonl")


def write_rows(path: Path, rows: Rows) -> str:
    """A data file; returns the key that names it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.train_files={path}"


def command(run_dir: Path, *overrides: str) -> list[str]:
    """The main job on a cluster of its own."""
    own = (f"trainer.default_local_dir={run_dir}", "ray_kwargs.ray_init.address=local")
    return [sys.executable, "-m", "grpo_dist.main", *own, *overrides]


def train(run_dir: Path, *overrides: str, **environment: str) -> Rows:
    """Run the command to its end; returns the metrics of the steps."""
    env = os.environ | environment
    done = subprocess.run(command(run_dir, *overrides), env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return steps(run_dir)


def train_here(run_dir: Path, *overrides: str, job: Callable[[list[str]], int] = main) -> Rows:
    """Run a command on the cluster of the tests (`shared_ray`); returns all metrics."""
    assert job(["trainer.logger=[console]", f"trainer.default_local_dir={run_dir}", *overrides]) == 0
    return metrics(run_dir)
