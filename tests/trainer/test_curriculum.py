"""The built-in curriculum in the trainer's loop, on fake workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.trainer.checkpoint.folder import read_state
from tests.trainer.fake_run import make_trainer
from tests.trainer.recorded import history

pytestmark = [pytest.mark.ray, pytest.mark.deep]

POOLS = ("easy", "useful", "hard", "unseen")


def test_the_curriculum_learns_from_every_step(groups: dict, tmp_path: Path) -> None:
    """Batches of 4 different prompts out of 8: half of them are unseen after the first."""
    trainer = make_trainer(tmp_path, groups, "data.curriculum.enable=true", "data.train_max_samples=8")
    trainer.fit()
    shares = [[row[f"curriculum/{pool}"] for pool in POOLS] for row in history(trainer)[1:]]
    assert shares[0][3] == 0.5
    assert [sum(step) for step in shares] == pytest.approx([1.0] * 3)
    curriculum = read_state(tmp_path / "run" / "global_step_3").sampler["curriculum"]
    assert sum(curriculum["visits"]) == 12
    assert curriculum["range"] == [0.0, 11.0], "responses of 8 to 11 tokens score 8 to 11"
