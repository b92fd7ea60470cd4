"""A run in an installed environment of verifiers, which knows only verifiers and has an interpreter of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_dist.tracking.jsonl import read_metrics

ROOT = Path(__file__).parents[2]
STEPS = 8


@pytest.mark.long  # installs verifiers
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_the_built_in_model_learns_in_an_environment_of_verifiers(tmp_path: Path) -> None:
    """The example, with fewer episodes: the rewards are those of the environment, and rise."""
    python = tmp_path / "env" / "bin" / "python"
    uv = Path(sys.executable).parent / "uv"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "env"], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, ROOT / "examples" / "verifiers"], check=True)
    env = {"GRPO_DIST_PYTHON": sys.executable, "VERIFIERS_PYTHON": str(python), "DATA_DIR": str(tmp_path / "rows")}
    run = [
        *("bash", ROOT / "examples" / "verifiers" / "run.sh", f"trainer.default_local_dir={tmp_path / 'run'}"),
        *("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16", "data.val_max_samples=32"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1", "trainer.export_hf_model=false"),
        *("actor_rollout_ref.actor.optim.lr=2e-4", "trainer.seed=1", "ray_kwargs.ray_init.address=local"),
    ]
    done = subprocess.run(run, env={**os.environ, **env}, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    rewards = [row["critic/score/mean"] for row in steps]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
    assert all(row["reward_extra/characters/mean"] > 0 for row in steps)
    for step in range(1, STEPS + 1):
        for line in (tmp_path / "run" / "rollouts" / f"{step}.jsonl").read_text().splitlines():
            row = json.loads(line)
            a, b = map(int, re.findall(r"\d+", row["input"])[:2])
            found = re.search(r"#### (\d+)", row["output"])
            assert row["score"] == float(found is not None and int(found[1]) == a + b), row
