"""A dry run builds the models as the ranks of a run do, and refuses what they would refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.assets import resolve_model_path
from grpo_dist.main import main, sft
from tests.messages import says
from tests.models import another_builtin_model

MODEL = "actor_rollout_ref.model"
COUNT = 476_224  # parameters of the built-in model
FACTORS = 3 * 4 * (128 + 128)  # of rank 4, of a projection from 128 to 128, in three layers
Command = Callable[..., str]
ROWS = ("data.train_max_samples=64", "data.val_files=null", "trainer.total_training_steps=1", "trainer.test_freq=-1")


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)

    def command(*overrides: str, code: int = 0, main: Callable[[list[str]], int] = main) -> str:
        assert main([*overrides, "trainer.dry_run=true"]) == code
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return shown.err if code else shown.out

    return command


@pytest.mark.deep
def test_every_model_of_a_run_is_built(dry_run: Command, tmp_path: Path) -> None:
    said = dry_run()
    says(said, f"{MODEL}.path", f"{COUNT:,}")
    assert "critic.model.path" not in said
    with_critic = dry_run("recipe=ppo", "algorithm.adv_estimator=gae")
    says(with_critic, f"{MODEL}.path", "critic.model.path: built", f"{COUNT + 128:,}")
    teacher = another_builtin_model(tmp_path / "teacher")
    key = "actor_rollout_ref.ref.model.path"
    says(dry_run("recipe=distill", f"{key}={teacher}"), f"{key}: built")


def test_factors_of_lora_are_counted(dry_run: Command) -> None:
    lora = (f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules=[q_proj]")
    says(dry_run(*lora), f"{COUNT + FACTORS:,}", f"{FACTORS:,} of them")
    says(dry_run(*ROWS, "model.lora_rank=4", "model.target_modules=[q_proj]", main=sft), f"{FACTORS:,} of them")


@pytest.mark.parametrize(
    ("command", "overrides", "setting"),
    [
        (main, [f"{MODEL}.lora_rank=4"], f"{MODEL}.target_modules"),
        (sft, [*ROWS, "model.lora_rank=4"], "model.target_modules"),
    ],
    ids=["main", "sft"],
)
def test_layers_that_do_not_fit_the_factors_are_refused_before_ray_starts(
    dry_run: Command, command: Any, overrides: list[str], setting: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Without a dry run too; here those of an output layer that is tied to the embedding."""
    says(dry_run(*overrides, f"{setting}=[query]", code=2, main=command), setting, "query", "all-linear")
    monkeypatch.setattr("grpo_dist.run.run.prepare", lambda *arguments: pytest.fail("Ray starts"))
    assert command([*overrides, f"{setting}=[q_proj,lm_head]"]) == 2
    says(capsys.readouterr().err, setting, "lm_head", "model.embed_tokens", "tie_word_embeddings")
    assert not list(Path().iterdir())


def test_files_of_another_model_are_refused(dry_run: Command, tmp_path: Path) -> None:
    """Their names fit, and one shape does not."""
    folder = Path(shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 512}))
    says(dry_run(f"{MODEL}.path={folder}", code=2), f"{MODEL}.path={folder}", "(512, 128)")
