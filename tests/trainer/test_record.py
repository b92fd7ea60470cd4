"""What a run shows and writes down, whatever its command."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_dist.config.load import load_command
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.config.supervised import REWARD_MODEL
from grpo_dist.errors import ConfigError
from grpo_dist.tracking.jsonl import read_metrics
from grpo_dist.trainer.checkpoint.resume import Resumed
from grpo_dist.trainer.record import RESOLVED_CONFIG, make_run_dir, open_record, say, write_config
from tests.messages import refuses, says
from tests.trainer.checkpoints import run_state


def load(tmp_path: Path, *overrides: str) -> JobConfig:
    return load_command(
        [f"trainer.default_local_dir={tmp_path}/run", "trainer.logger=[console]", *overrides], REWARD_MODEL
    )[0]


@pytest.mark.parametrize("loggers", ["[console]", "[]", "jsonl", "[tensorboard,jsonl]"])
def test_messages_are_shown_unless_the_console_is_turned_off(
    loggers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever else records the metrics."""
    say(load(tmp_path, f"trainer.logger={loggers}"), "hello")
    say(load(tmp_path, f"trainer.logger={loggers}", "trainer.console=false"), "nobody")
    assert capsys.readouterr() == ("", "hello\n")


def test_the_plan_says_where_metrics_go(tmp_path: Path) -> None:
    assert load(tmp_path, "trainer.logger=wandb").trainer.records == ("jsonl", "console", "wandb")
    silent = load(tmp_path, "trainer.logger=[console,tensorboard]", "trainer.console=false")
    assert silent.trainer.records == ("jsonl", "tensorboard")


def test_without_a_console_there_is_no_display(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened(load(tmp_path, "trainer.console=false"), None)
    assert capsys.readouterr() == ("", "")


def test_the_run_directory_and_that_of_validation_alone(tmp_path: Path) -> None:
    assert make_run_dir(load(tmp_path)) == tmp_path / "run"
    assert make_run_dir(load(tmp_path)).is_dir(), "also where it is there"
    assert make_run_dir(load(tmp_path, "trainer.val_only=true")) == tmp_path / "run/val_only"


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with refuses(ConfigError, f"trainer.default_local_dir={tmp_path}/run"):
        make_run_dir(load(tmp_path))


def test_the_config_is_written_whole_with_the_types_that_are_used(tmp_path: Path) -> None:
    config = load(tmp_path, "optim.lr=0.25")
    write_config(config, make_run_dir(config))
    found = yaml.safe_load((tmp_path / "run" / RESOLVED_CONFIG).read_text())
    assert (found["optim"]["lr"], found["engine"]["dtype"]) == (0.25, "fp32")
    assert type(config).model_validate(found).optim.lr == 0.25  # type: ignore[attr-defined]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [RESOLVED_CONFIG]


def opened(config: JobConfig, resumed: Resumed | None, steps: int = 9) -> None:
    with ExitStack() as stack:
        _, trackers = open_record(config, make_run_dir(config), resumed, steps, stack)
        trackers.log({"a": 1.0}, 5)


def test_a_new_run_says_where_its_metrics_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened(load(tmp_path), None)
    told = capsys.readouterr().err
    says(told, f"{tmp_path}/run/metrics.jsonl")
    assert "resumed" not in told


def test_a_resumed_run_says_from_where_and_what_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And its record goes on behind the checkpoint: rows after it are dropped."""
    config = load(tmp_path)
    (make_run_dir(config) / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "a": 0}}\n' for step in (3, 4, 6)))
    folder = tmp_path / "run/global_step_4"
    opened(config, Resumed(folder, run_state(4), ["optim.lr: 1 -> 2"]))
    says(capsys.readouterr().err, f"resumed from {folder}", "optim.lr: 1 -> 2")
    rows: list[Any] = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [(row["step"], row["a"]) for row in rows] == [(3, 0), (4, 0), (5, 1)]


def test_a_run_with_nothing_to_train_says_what_to_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened(load(tmp_path), Resumed(tmp_path, run_state(4), []), steps=4)
    says(capsys.readouterr().err, "step 4", "trainer.total_training_steps", "resume_mode=disable")
    opened(load(tmp_path, "trainer.val_only=true"), Resumed(tmp_path, run_state(4), []), steps=4)
    assert "total_training_steps" not in capsys.readouterr().err
