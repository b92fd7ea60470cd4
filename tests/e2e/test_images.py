"""The built-in task with images, whole: the policy learns to look, and a killed run goes on with its pictures."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from grpo_dist.tracking.metric_names import validation_accuracy
from tests.e2e.runs import rollouts, sized, train, train_here

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deep, pytest.mark.timeout(900)]

SQUARES = ("data=squares", "data.train_max_samples=640", "trainer.test_freq=-1")


def test_a_policy_learns_to_look(shared_ray: None, tmp_path: Path) -> None:
    end = ("trainer.total_training_steps=16", "trainer.test_freq=16", "trainer.save_freq=-1")
    before, *steps = train_here(tmp_path, *SQUARES, *end)
    assert validation_accuracy(before) == pytest.approx(0.27, abs=0.02)
    assert validation_accuracy(steps[-1]) > 0.5, "it goes through the rows of the board"
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in steps), "both see the same"
    images = [row["images"] for row in rollouts(tmp_path, 16)]
    assert all(len(of_row) == 1 and of_row[0].startswith("data:image/jpeg;base64,") for of_row in images)
    assert len({of_row[0] for of_row in images}) > 16
    weights = load_file(tmp_path / "huggingface" / "model.safetensors")
    assert {name for name in weights if "vision_model" in name}


@pytest.mark.long
def test_groups_that_wait_in_a_checkpoint_keep_their_pictures(tmp_path: Path) -> None:
    options = (*SQUARES, *sized(8, n=4), "trainer.max_staleness=1", "trainer.total_training_steps=3")
    options = (*options, "actor_rollout_ref.actor.freeze_vision_tower=false")
    options = (*options, "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=3", "data.val_files=null")
    train(tmp_path / "whole", *options)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for done in ("global_step_2", "global_step_3", "huggingface"):
        shutil.rmtree(tmp_path / "again" / done)
    (tmp_path / "again" / "latest_checkpointed_iteration.txt").write_text("1")
    assert list((tmp_path / "again" / "global_step_1" / "groups").glob("*.safetensors"))
    train(tmp_path / "again", *options)
    whole, again = (load_file(tmp_path / name / "huggingface" / "model.safetensors") for name in ("whole", "again"))
    assert all(weight.equal(again[name]) for name, weight in whole.items())
    assert (tmp_path / "whole" / "huggingface" / "processor_config.json").is_file()
