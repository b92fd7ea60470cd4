"""One run at a time in a run directory."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError, DiskError, GrpoDistError
from grpo_dist.trainer.run_lock import FILE_NAME, check_run_dir, run_lock, writing_into
from tests.messages import refuses

HOLD = """
import sys, time
from pathlib import Path
from grpo_dist.trainer.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_another_process_is_told_who_is_at_work_until_that_one_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with refuses(ConfigError, "another run", f"process {other.pid}", f"trainer.default_local_dir={tmp_path}"):
            with run_lock(tmp_path):
                raise AssertionError("two at once")
        other.kill()
    with run_lock(tmp_path):
        assert (tmp_path / FILE_NAME).read_text().startswith(f"process {os.getpid()} on ")


def test_it_is_let_go_of_at_the_end(tmp_path: Path) -> None:
    for _ in range(2):
        with run_lock(tmp_path):
            pass
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0


def test_it_is_not_inherited_by_processes_that_outlive_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with run_lock(tmp_path):
        child = subprocess.Popen(command, close_fds=False, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n", "its program runs: the kernel closes files only as that begins"
    try:
        with run_lock(tmp_path):
            pass
    finally:
        child.kill()
        child.communicate()


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with run_lock(tmp_path):
        pass
    assert "no lock" in caplog.text


def test_a_directory_that_must_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with refuses(ConfigError, f"trainer.default_local_dir={tmp_path}/run", "written", "Permission denied"):
        check_run_dir(tmp_path / "run")


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with refuses(ConfigError, f"trainer.default_local_dir={tmp_path}/none", "written"), run_lock(tmp_path / "none"):
        pass


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [(errno.ENOSPC, DiskError, 1), (errno.EDQUOT, DiskError, 1), (errno.EIO, DiskError, 1),
     (errno.EACCES, ConfigError, 2), (errno.ENOTDIR, ConfigError, 2)],
)  # fmt: skip
def test_a_full_disk_is_no_fault_of_the_config(
    number: int, kind: type[GrpoDistError], code: int, tmp_path: Path
) -> None:
    with refuses(kind, f"trainer.default_local_dir={tmp_path}") as caught, writing_into(tmp_path):
        raise OSError(number, os.strerror(number))
    assert caught.value.exit_code == code  # type: ignore[attr-defined]
