"""Which checkpoint and which run a model is of. How commands use it: tests/cli/test_trained.py."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.assets.model_folder import Usage
from grpo_dist.errors import CheckpointError
from grpo_dist.plan.commands import load_config
from grpo_dist.trainer.checkpoint.folder import (
    LATEST,
    is_model_of,
    is_model_of_run,
    others,
    own_checkpoints,
    run_digest,
)
from grpo_dist.trainer.checkpoint.manifest import MANIFEST, checkpoint_digest
from grpo_dist.trainer.record import write_config
from tests.messages import refuses, says
from tests.trainer.checkpoints import save


def test_two_checkpoints_of_equal_content_are_two(tmp_path: Path) -> None:
    first, model = checkpoint_digest(save(tmp_path, 3)), tmp_path / "huggingface"
    model.mkdir()
    Usage(3, checkpoint=first).write(model)
    assert is_model_of(model, tmp_path / "global_step_3")
    assert not is_model_of(model, save(tmp_path, 4))
    assert not is_model_of(model, save(tmp_path, 3)), "it has been written once more"
    Usage(3).write(model)
    assert not is_model_of(model, tmp_path / "global_step_3"), "it does not say"
    assert not is_model_of(tmp_path / "gone", tmp_path / "global_step_3")
    (tmp_path / "global_step_3" / MANIFEST).write_text("{}")
    with refuses(CheckpointError, tmp_path / "global_step_3", MANIFEST):
        is_model_of(model, tmp_path / "global_step_3")


def test_two_starts_of_the_same_config_are_two(tmp_path: Path) -> None:
    config, _ = load_config([])
    assert run_digest(tmp_path) is None
    assert not is_model_of_run(tmp_path, tmp_path), "neither says anything"
    write_config(config, tmp_path)
    Usage(3, run=run_digest(tmp_path)).write(tmp_path)
    assert is_model_of_run(tmp_path, tmp_path)
    write_config(config, tmp_path)
    assert not is_model_of_run(tmp_path, tmp_path)


def test_checkpoints_that_do_not_say_whose_they_are_are_not_the_runs_own(tmp_path: Path) -> None:
    """`save` writes no history, as older versions did not."""
    assert own_checkpoints(tmp_path) == {}
    assert others(tmp_path) == ""
    save(tmp_path, 2)
    folder = save(tmp_path, 3)
    assert own_checkpoints(tmp_path) == {3: folder}
    says(others(tmp_path), LATEST, "global_step_2", tmp_path / "global_step_2")
    assert "global_step_3" not in others(tmp_path)
    (folder / "state.json").write_text("{")
    assert own_checkpoints(tmp_path) == {3: folder}
    (tmp_path / LATEST).unlink()
    assert own_checkpoints(tmp_path) == {}
