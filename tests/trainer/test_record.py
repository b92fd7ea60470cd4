"""What a run shows and writes down, whatever its command."""

import errno
import fcntl
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from grpo_dist.config.load import load_command
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.errors import ConfigError, DiskError
from grpo_dist.plan.commands import REWARD_MODEL
from grpo_dist.tracking.jsonl import read_metrics
from grpo_dist.trainer.checkpoint.saver import Resumed
from grpo_dist.trainer.record import FILE_NAME, check_run_dir, make_run_dir, open_record, run_lock, say, writing_into
from tests.messages import refuses, says
from tests.trainer.checkpoints import run_state


def load(tmp_path: Path, *overrides: str) -> JobConfig:
    given = (f"trainer.default_local_dir={tmp_path}/run", "trainer.logger=[console]")
    return load_command([*given, *overrides], REWARD_MODEL)[0]


def test_messages_are_shown_unless_the_console_is_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for loggers in ("[console]", "[]", "jsonl", "[tensorboard,jsonl]"):
        say(load(tmp_path, f"trainer.logger={loggers}"), "hello")
        say(load(tmp_path, f"trainer.logger={loggers}", "trainer.console=false"), "nobody")
        assert capsys.readouterr() == ("", "hello\n")
    assert load(tmp_path, "trainer.logger=wandb").trainer.records == ("jsonl", "console", "wandb")
    silent = load(tmp_path, "trainer.logger=[console,tensorboard]", "trainer.console=false")
    assert silent.trainer.records == ("jsonl", "tensorboard")


def test_the_run_directory_and_that_of_validation_alone(tmp_path: Path) -> None:
    assert make_run_dir(load(tmp_path)) == tmp_path / "run"
    assert make_run_dir(load(tmp_path)).is_dir(), "also where it is there"
    assert make_run_dir(load(tmp_path, "trainer.val_only=true")) == tmp_path / "run/val_only"


def opened(config: JobConfig, resumed: Resumed | None, steps: int = 9) -> None:
    with ExitStack() as stack:
        _, trackers = open_record(config, make_run_dir(config), resumed, steps, stack)
        trackers.log({"a": 1.0}, 5)


def test_a_run_says_where_its_metrics_go_and_from_where_it_goes_on(tmp_path: Path, capsys: Any) -> None:
    """Its record goes on behind the checkpoint: rows after it are dropped."""
    opened(load(tmp_path, "trainer.console=false"), None)
    assert capsys.readouterr() == ("", "")
    config = load(tmp_path)
    opened(config, None)
    told = capsys.readouterr().err
    says(told, f"{tmp_path}/run/metrics.jsonl")
    assert "resumed" not in told
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


def test_who_is_at_work_is_told_and_the_lock_not_inherited_by_processes_that_outlive_the_run(tmp_path: Path) -> None:
    """The kernel lets go of it with the file, also where the process is killed."""
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with run_lock(tmp_path):
        assert (tmp_path / FILE_NAME).read_text().startswith(f"process {os.getpid()} on ")
        with refuses(ConfigError, "another run", f"process {os.getpid()}", f"trainer.default_local_dir={tmp_path}"):
            with run_lock(tmp_path):
                raise AssertionError("two at once")
        child = subprocess.Popen(command, close_fds=False, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n", "its program runs: the kernel closes files only as that begins"
    try:
        with run_lock(tmp_path):
            pass
    finally:
        child.kill()
        child.communicate()
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0


def test_a_file_system_without_locks_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "No locks available")), run_lock(tmp_path):
        pass
    assert "no lock" in caplog.text


def test_a_directory_that_cannot_be_made_or_entered(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with refuses(ConfigError, f"trainer.default_local_dir={tmp_path}/run"):
        make_run_dir(load(tmp_path))
    with refuses(ConfigError, "trainer.default_local_dir=/proc/mine", "/proc "):
        check_run_dir(Path("/proc/mine"))
    with refuses(ConfigError, f"trainer.default_local_dir={tmp_path}/none", "written"), run_lock(tmp_path / "none"):
        pass
    denied = PermissionError(errno.EACCES, "Permission denied")
    with refuses(ConfigError, f"trainer.default_local_dir={tmp_path}/run", "written", "Permission denied"):
        with patch.object(Path, "exists", side_effect=denied):
            check_run_dir(tmp_path / "run")


DISK, OWN = (errno.ENOSPC, errno.EDQUOT, errno.EIO), (errno.EACCES, errno.ENOTDIR)


@pytest.mark.parametrize(("kind", "code", "numbers"), [(DiskError, 1, DISK), (ConfigError, 2, OWN)])
def test_a_full_disk_is_no_fault_of_the_config(kind: Any, code: int, numbers: tuple, tmp_path: Path) -> None:
    for number in numbers:
        with refuses(kind, f"trainer.default_local_dir={tmp_path}") as caught, writing_into(tmp_path):
            raise OSError(number, os.strerror(number))
        assert caught.value.exit_code == code  # type: ignore[attr-defined]
