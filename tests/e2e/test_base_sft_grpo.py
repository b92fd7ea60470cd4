"""From random weights to solved sums by the commands alone: base, supervised fine-tuning, GRPO on its model.

Margins are wide: processors round differently, and hundreds of steps of that make another model.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.tracking.jsonl import read_metrics
from grpo_dist.tracking.metric_names import validation_accuracy

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
COMMON = ("model=tiny", "data=arithmetic", "trainer.logger=[console]", "trainer.save_freq=-1",
          "ray_kwargs.ray_init.address=local")  # fmt: skip
MARGIN = 0.1


def run(*command: str) -> None:
    """Run Python with these arguments, as a user does."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def accuracies(run_dir: Path) -> list[float]:
    """Of each validation, in order."""
    found = map(validation_accuracy, read_metrics(run_dir / "metrics.jsonl"))
    return [accuracy for accuracy in found if accuracy is not None]


def test_each_stage_takes_what_the_one_before_has_made(tmp_path: Path) -> None:
    base, sft, grpo = tmp_path / "base", tmp_path / "sft", tmp_path / "grpo"
    run("scripts/make_tiny_model.py", "--untrained", str(base))
    run(
        *("-m", "grpo_dist.main", *COMMON, f"actor_rollout_ref.model.path={base}", "trainer.val_only=true"),
        f"trainer.default_local_dir={grpo}",
    )
    (base_accuracy,) = accuracies(grpo / "val_only")
    run(
        *("-m", "grpo_dist.sft", *COMMON, f"model.path={base}", "optim.lr=3e-3", "trainer.total_training_steps=600"),
        *("trainer.total_epochs=5", "trainer.test_freq=-1", "trainer.val_before_train=false"),
        *("cluster.world_size=2", "cluster.num_threads_per_worker=1", f"trainer.default_local_dir={sft}"),
    )
    run(
        *("-m", "grpo_dist.main", *COMMON, f"actor_rollout_ref.model.path={sft}/huggingface"),
        *("trainer.total_training_steps=20", "trainer.test_freq=20", f"trainer.default_local_dir={grpo}"),
    )
    sft_accuracy, grpo_accuracy = accuracies(grpo)
    assert sft_accuracy > base_accuracy + MARGIN
    assert grpo_accuracy > sft_accuracy - MARGIN, "there is nothing left to learn, and nothing is forgotten"
