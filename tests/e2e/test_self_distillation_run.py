"""The main job with a policy that teaches itself, on real workers: by successes, and with LoRA by a text of the row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_dist.main import main
from grpo_dist.protocol.parquet import read_parquet
from grpo_dist.tasks import arithmetic

pytestmark = [
    pytest.mark.usefixtures("shared_ray"),
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(600),
]

SHOWN = "algorithm.self_distillation"
SETTINGS = (
    "recipe=sdpo",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "data.val_files=null",
    "trainer.save_freq=-1",
    "trainer.export_hf_model=false",
    "trainer.total_training_steps=2",
    "trainer.logger=[console]",
)


def train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    assert main([*SETTINGS, f"trainer.default_local_dir={folder}", *overrides]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-2:]


def test_it_is_shown_successes_of_its_groups(tmp_path: Path) -> None:
    """Of 64 responses some are right; groups without one learn nothing, and the teacher moves."""
    for row in train(tmp_path / "run"):
        assert 0 < row["actor/self_distilled_fraction"] < 1
        assert row["actor/kl_loss"] > 0
        assert row["actor/grad_norm"] > 0
    data = read_parquet(tmp_path / "run" / "rollouts" / "1.parquet")
    shown = data["teacher_prompts"].lengths > 0
    for uid in set(data["uid"]):
        rows = [i for i, other in enumerate(data["uid"]) if other == uid]
        successes = [i for i in rows if data["score"][i] >= 1]
        assert [bool(shown[i]) for i in rows] == [bool(set(successes) - {i}) for i in rows]
    assert (data["teacher_prompts"].lengths > data["prompts"].lengths)[shown].all()


def test_with_lora_it_is_shown_a_text_of_the_row(tmp_path: Path) -> None:
    rows = [row | {"extra_info": {"hint": arithmetic.worked_answer(1, 2)}} for row in arithmetic.rows("train")[:16]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = (f"{SHOWN}.success_threshold=null", f"{SHOWN}.feedback_name=hint", "actor_rollout_ref.rollout.n=1")
    lora = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.ref.ref_model_sync_steps=-1")
    for row in train(tmp_path / "run", f"data.train_files={tmp_path / 'rows.jsonl'}", *said, *lora):
        assert row["actor/self_distilled_fraction"] == 1
        assert row["actor/kl_loss"] > 0
        assert row["actor/grad_norm"] > 0
