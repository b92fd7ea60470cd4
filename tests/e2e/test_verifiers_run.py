"""A run in an installed environment of verifiers, which knows only verifiers and has an interpreter of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.runs import metrics, rollouts

EXAMPLE = Path(__file__).parents[2] / "examples" / "verifiers"
ACCURACY = "val-core/additions/reward/mean@1"


@pytest.mark.long  # installs verifiers
@pytest.mark.ray
@pytest.mark.timeout(1500)
def test_the_built_in_model_learns_in_an_environment_of_verifiers(tmp_path: Path) -> None:
    """The example as it is: the rewards are those of the environment, and rise."""
    python, run_dir = tmp_path / "env" / "bin" / "python", tmp_path / "run"
    uv = Path(sys.executable).parent / "uv"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "env"], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, EXAMPLE], check=True)
    env = {"GRPO_DIST_PYTHON": sys.executable, "VERIFIERS_PYTHON": str(python), "DATA_DIR": str(tmp_path / "rows")}
    run = [
        *("bash", EXAMPLE / "run.sh", f"trainer.default_local_dir={run_dir}", "ray_kwargs.ray_init.address=local"),
        *("trainer.seed=1", "trainer.test_freq=5", "trainer.save_freq=-1", "trainer.export_hf_model=false"),
    ]
    done = subprocess.run(run, env={**os.environ, **env}, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = metrics(run_dir)
    validation = [row[ACCURACY] for row in rows if ACCURACY in row]
    assert validation[0] < 0.5
    assert validation[-1] > 0.8
    steps = [row for row in rows if row["step"]]
    rewards = [row["critic/score/mean"] for row in steps]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
    assert all(row["reward_extra/characters/mean"] > 0 for row in steps)
    for row in (row for step in range(1, len(steps) + 1) for row in rollouts(run_dir, step)):
        a, b = map(int, re.findall(r"\d+", row["input"])[:2])
        found = re.search(r"#### (\d+)", row["output"])
        assert row["score"] == float(found is not None and int(found[1]) == a + b), row
