"""One run at a time in a run directory: two would clear away and overwrite each other's checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from grpo_dist.errors import ConfigError

logger = logging.getLogger(__name__)

FILE_NAME = "run.lock"


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run directory. The kernel lets go of it when the process ends, however it ends.

    The lock is `flock`'s: it holds between machines where the file system says so (NFS from version 4, Lustre with
    `flock`). One that has no locks is told in a warning, and used.

    Args:
        run_dir: exists.

    Raises:
        ConfigError: another run holds it, or the file cannot be written.
    """
    with writing_into(run_dir):
        file = os.fdopen(os.open(run_dir / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8")
    with file:
        _lock(file, run_dir)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def check_run_dir(run_dir: Path) -> None:
    """Check that a run could work there, without making the folder.

    Raises:
        ConfigError: another run holds it, or it cannot be written.
    """
    with writing_into(run_dir):
        there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
        if not there.is_dir():
            raise NotADirectoryError(f"{there} is a file")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(f"{there} is not writable by you")
        file = (run_dir / FILE_NAME).open("r+", encoding="utf-8") if (run_dir / FILE_NAME).exists() else None
    if file is not None:
        with file:
            _lock(file, run_dir)


def _lock(file: TextIO, run_dir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"trainer.default_local_dir={run_dir}: another run is at work there ({file.read().strip()}). Wait for "
            "its end or stop it, or set trainer.experiment_name or trainer.default_local_dir to another place"
        ) from None
    except OSError as error:
        logger.warning("%s: no lock (%s): take care that no other run works there", run_dir, error)


@contextlib.contextmanager
def writing_into(run_dir: Path) -> Iterator[None]:
    """What the disk refuses within is a mistake in the config.

    Raises:
        ConfigError: it has refused something.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"trainer.default_local_dir={run_dir}: cannot be written: {error}") from error
