"""`grpo-dist NAME`: the commands are found, and what is no command is answered with the nearest one."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import grpo_dist
from grpo_dist.cli.entry import ENTRIES, main
from grpo_dist.plugins.registry import load_attribute
from tests.messages import says

ROOT = Path(grpo_dist.__file__).parents[1]


@pytest.mark.parametrize("arguments", [[], ["help"], ["-h"], ["--help"]])
def test_alone_it_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    says(capsys.readouterr().out, *ENTRIES, "--version", "python -m grpo_dist")


def test_every_command_is_there() -> None:
    for name, (function, _) in ENTRIES.items():
        assert callable(load_attribute(function, key=name))


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "help"])
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["help", name])
    except SystemExit as end:  # argparse's way
        code = end.code
    assert code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "advice"),
    [("trian", "train"), ("exprot", "export"), ("data.train_batch_size=8", "grpo-dist train data.train_batch_size=8")],
)
def test_what_is_no_command_is_answered_with_the_nearest(
    typed: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([typed]) == 2
    told = capsys.readouterr().err
    says(told, typed, *ENTRIES)
    assert f" {advice}?" in told


def test_train_is_the_main_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "trainer.dry_run=config"]) == 0
    through_entry = capsys.readouterr().out
    assert load_attribute("grpo_dist.main:main", key="")(["trainer.dry_run=config"]) == 0
    assert capsys.readouterr().out == through_entry
    assert main(["train", "algorithm.adv_estimater=grpo"]) == 2
    says(capsys.readouterr().err, "algorithm.adv_estimator")


def test_data_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "arithmetic", "--local_save_dir", str(tmp_path)]) == 0
    assert (tmp_path / "train.parquet").is_file()
    says(capsys.readouterr().out, tmp_path / "train.parquet")


def test_the_version_is_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"grpo_dist {grpo_dist.__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "grpo_dist.__version__"}
    module, _, function = project["project"]["scripts"]["grpo-dist"].partition(":")
    assert (module, function) == (main.__module__, "main")


def test_the_package_is_the_command_too_and_an_error_is_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "grpo_dist", "help", "no_such_thing_at_all"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    says(done.stderr, "no_such_thing_at_all")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["-m", "grpo_dist.main"], ["-m", "grpo_dist", "doctor"]])
def test_a_folder_that_is_gone_is_told(command: list[str], tmp_path: Path) -> None:
    """The shell of a job whose folder was cleaned up."""
    gone = tmp_path / "job"
    gone.mkdir()
    script = 'rmdir "$PWD" && exec "$@"'
    started = ["bash", "-c", script, "bash", sys.executable, *command]
    done = subprocess.run(started, cwd=gone, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    says(done.stderr, 'cd "$PWD"')
