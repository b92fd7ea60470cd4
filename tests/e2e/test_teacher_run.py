"""The main job with a teacher of another size, on real workers: LoRA, prompts alone, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.main import main
from grpo_dist.tasks import arithmetic
from tests.models import another_builtin_model

pytestmark = [
    pytest.mark.usefixtures("shared_ray"),
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(600),
]

STEPS = 4
SETTINGS = (
    "recipe=distill",
    "data=arithmetic",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.model.lora_rank=4",
    "data.val_max_samples=8",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    "trainer.logger=[console]",
)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A teacher, and prompts without ground truths."""
    folder = tmp_path_factory.mktemp("taught")
    rows = [{"prompt": row["prompt"]} for row in arithmetic.rows("train")[:12]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    teacher = another_builtin_model(folder / "teacher", tie_word_embeddings=False, vocab_size=264)
    return [f"data.train_files={folder / 'prompts.jsonl'}", f"actor_rollout_ref.ref.model.path={teacher}"]


def train(folder: Path, *overrides: str) -> Path:
    assert main([*SETTINGS, f"trainer.default_local_dir={folder}", *overrides]) == 0
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_is_taught_and_a_stop_changes_no_bit(overrides: list[str], tmp_path: Path) -> None:
    """After a stop the teacher is loaded again from its folder, and its output layer comes to the actor once more."""
    whole = train(tmp_path / "whole", *overrides, f"trainer.total_training_steps={STEPS}")
    rows = metrics(whole)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all(row["actor/kl_loss"] > 1 and row["actor/grad_norm"] > 0 for row in rows[1:]), "far from its teacher"
    assert all(row["critic/advantages/max"] == row["critic/score/max"] == 0 for row in rows[1:])
    assert rows[0]["val-core/arithmetic/acc/mean@1"] > 0, "rows with a ground truth are scored"
    half = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole}/global_step_2")
    resumed = train(tmp_path / "resumed", *overrides, f"trainer.total_training_steps={STEPS}", *half)
    losses = [[row["actor/kl_loss"] for row in metrics(folder)[-2:]] for folder in (whole, resumed)]
    assert losses[0] == losses[1]
    files = [(folder / "huggingface" / "model.safetensors").read_bytes() for folder in (whole, resumed)]
    assert files[0] == files[1]
    assert not (whole / "global_step_2" / "ref").exists()
