"""The whole run with an engine that is not vLLM: a class of 90 lines, which nothing in the package knows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[1] / "engines" / "transformers_engine.py"


@pytest.mark.ray
@pytest.mark.deep
@pytest.mark.timeout(300)
def test_three_steps_with_transformers_as_engine(tmp_path: Path) -> None:
    """Its log-probs are the trainer's, in the first batch, or the run stops, and with the weights of each sync."""
    run = [
        *(sys.executable, "-m", "grpo_dist.main", f"actor_rollout_ref.rollout.name={ENGINE}:TransformersEngine"),
        *("actor_rollout_ref.rollout.n=8", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        *("trainer.total_training_steps=3", "data.val_files=null", "data.max_response_length=16"),
        *("trainer.save_freq=-1", "trainer.export_hf_model=false", "ray_kwargs.ray_init.address=local"),
        f"trainer.default_local_dir={tmp_path}",
    ]
    done = subprocess.run(run, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert len(steps) == 3
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4
    assert any(step["actor/grad_norm"] > 0 for step in steps[:2]), "or the syncs bring nothing new"
