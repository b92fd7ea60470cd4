"""From random weights to solved sums by the commands alone: base, supervised fine-tuning, GRPO on its model.

The written answers are of two kinds, as in the built-in model's warm start: most forget the carries, some show the
work. So the fine-tuned model answers hastily and is mostly wrong, and GRPO finds out that showing the work pays.

Margins are wide: processors round differently, and hundreds of steps of that make another model.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.tasks import arithmetic
from grpo_dist.tracking.metric_names import validation_accuracy
from scripts.make_tiny_model import direct_response, operands
from tests.e2e.runs import metrics

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
    return [accuracy for row in metrics(run_dir) if (accuracy := validation_accuracy(row)) is not None]


def test_each_stage_takes_what_the_one_before_has_made(tmp_path: Path) -> None:
    """Two of three answers are hasty, each third is worked out."""
    base, sft, grpo, answers = (tmp_path / name for name in ("base", "sft", "grpo", "answers.parquet"))
    rows = []
    for number, row in enumerate(arithmetic.rows("train")):
        answer = (direct_response if number % 3 else arithmetic.worked_answer)(*operands(row))
        rows.append({"messages": [*row["prompt"], {"role": "assistant", "content": answer}]})
    pq.write_table(pa.Table.from_pylist(rows), answers)
    run("scripts/make_tiny_model.py", "--untrained", str(base))
    train, to_grpo = ("-m", "grpo_dist.main", *COMMON), f"trainer.default_local_dir={grpo}"
    run(*train, f"actor_rollout_ref.model.path={base}", "trainer.val_only=true", to_grpo)
    (base_accuracy,) = accuracies(grpo / "val_only")
    run(
        *("-m", "grpo_dist", "sft", *COMMON, f"model.path={base}", "optim.lr=3e-3", f"data.train_files={answers}"),
        *("trainer.total_epochs=10", "trainer.val_before_train=false", "trainer.total_training_steps=1200"),
        *("trainer.test_freq=-1", "cluster.world_size=2", "cluster.num_threads_per_worker=1"),
        f"trainer.default_local_dir={sft}",
    )
    length = ("trainer.total_training_steps=20", "trainer.test_freq=20")
    run(*train, f"actor_rollout_ref.model.path={sft}/huggingface", *length, to_grpo)
    sft_accuracy, grpo_accuracy = accuracies(grpo)
    assert sft_accuracy > base_accuracy + MARGIN
    assert grpo_accuracy > sft_accuracy + MARGIN
