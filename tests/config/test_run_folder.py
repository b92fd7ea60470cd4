"""Results of a Ray job outlive its working copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.config.command import AnyCommand
from grpo_dist.config.grpo import GRPO
from grpo_dist.config.load import load_command, run_folder
from grpo_dist.config.supervised import SFT
from grpo_dist.errors import ConfigError
from tests.messages import refuses, says

COMMANDS = pytest.mark.parametrize("command", [GRPO, SFT], ids=lambda command: command.module)


@pytest.fixture
def working_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which Ray runs a job, and a home folder."""
    copy = tmp_path / "ray/session_1/runtime_resources/working_dir_files/_ray_pkg_0123"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return copy


@COMMANDS
def test_a_relative_run_directory_of_a_job_lies_in_the_home_folder(
    command: AnyCommand, working_copy: Path, tmp_path: Path
) -> None:
    for given, folder in (((), "outputs/grpo_dist/run"), (("trainer.default_local_dir=mine",), "mine")):
        config, notes = load_command(list(given), command)
        assert config.trainer.default_local_dir.startswith(f"{tmp_path}/home/")
        says(notes, "trainer.default_local_dir", config.trainer.default_local_dir, working_copy)
        assert command is SFT or config.trainer.default_local_dir == f"{tmp_path}/home/{folder}"


@COMMANDS
def test_an_absolute_one_is_taken_as_it_is(command: AnyCommand, working_copy: Path, tmp_path: Path) -> None:
    config, notes = load_command([f"trainer.default_local_dir={tmp_path}/shared"], command)
    assert config.trainer.default_local_dir == f"{tmp_path}/shared"
    assert not any("default_local_dir" in note for note in notes)


def test_elsewhere_a_relative_one_stays_beside_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_command([], GRPO)[0].trainer.default_local_dir == "outputs/grpo_dist/run"


def test_a_wrong_value_is_told_as_what_it_is(working_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from grpo_dist import main

    assert main.main(["trainer.default_local_dir=[a]"]) == 2
    says(capsys.readouterr().err, "trainer.default_local_dir=")


@COMMANDS
def test_the_home_folder(command: AnyCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    line = ["trainer.default_local_dir='~/runs/a'", "trainer.resume_mode=resume_path", "trainer.resume_from_path='~/b'"]
    trainer = load_command(["trainer.dry_run=config", *line], command)[0].trainer
    assert (trainer.default_local_dir, trainer.resume_from_path) == (f"{tmp_path}/runs/a", f"{tmp_path}/b")
    assert run_folder(line, command) == tmp_path / "runs/a"
    for path in ("./~/a", "a/~", "a~"):
        assert load_command([("trainer.default_local_dir", path)], command)[0].trainer.default_local_dir == path


def test_the_home_folder_in_a_working_copy(working_copy: Path, tmp_path: Path) -> None:
    config, notes = load_command(["trainer.default_local_dir='~/mine'"], GRPO)
    assert config.trainer.default_local_dir == f"{tmp_path}/home/mine"
    assert not any("default_local_dir" in note for note in notes)


@COMMANDS
@pytest.mark.parametrize("key", ["trainer.experiment_name", "trainer.project_name"])
@pytest.mark.parametrize(
    "name", ["~", "~/x", "../x", "a/../../x", "..", ".", "/", "/tmp/x", "a//b", "a/", "a/~b", "a\0b"]
)
def test_names_that_lead_out_of_their_folder(command: AnyCommand, key: str, name: str) -> None:
    with refuses(ConfigError, key):
        load_command([(key, name)], command)


@pytest.mark.parametrize("name", ["a", "a/b", "a b", "a..b", "...", "a~", ".a", "名"])
def test_names_of_folders(name: str) -> None:
    config, _ = load_command([("trainer.experiment_name", name)], GRPO)
    assert config.trainer.default_local_dir == f"outputs/grpo_dist/{name}"


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a\0b"])
def test_folders_that_cannot_be(path: str) -> None:
    with refuses(ConfigError, "trainer.default_local_dir"):
        load_command([("trainer.default_local_dir", path)], GRPO)
