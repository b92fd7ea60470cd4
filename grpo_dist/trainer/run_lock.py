"""Allows one run at a time in a run directory, since two would remove and overwrite each other's checkpoints."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from grpo_dist.errors import ConfigError, DiskError

logger = logging.getLogger(__name__)

FILE_NAME = "run.lock"
# What no config mends, and may be over when the same command is run again.
_OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE})


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Lock the run directory. The kernel releases the lock when the process ends for any reason.

    The lock is made with `flock`. It works across machines if the file system supports that (NFS from version 4, Lustre
    with `flock`). If the file system has no locks, the run continues with a warning.

    Args:
        run_dir: the run directory, which must exist.

    Raises:
        ConfigError: another run has the lock, or the lock file cannot be written.
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
    """Check that a run could use the folder, without creating it.

    Raises:
        ConfigError: another run has the lock, or the folder cannot be written.
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
            f"trainer.default_local_dir={run_dir}: another run is using it ({file.read().strip()}). Wait for "
            "it to end or stop it, or set another trainer.experiment_name or trainer.default_local_dir"
        ) from None
    except OSError as error:
        logger.warning(
            "%s: the file system has no locks (%s): make sure that no other run uses the folder", run_dir, error
        )


@contextlib.contextmanager
def writing_into(run_dir: Path) -> Iterator[None]:
    """Turn an OSError within the block into an error about the run directory.

    Raises:
        DiskError: a file could not be written, since the disk is full or has failed.
        ConfigError: for another reason.
    """
    try:
        yield
    except OSError as error:
        kind = DiskError if error.errno in _OF_THE_DISK else ConfigError
        raise kind(f"trainer.default_local_dir={run_dir}: cannot be written: {error}") from error
