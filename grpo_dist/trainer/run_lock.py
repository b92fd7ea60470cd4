"""One run at a time in a run directory: two would clear away and overwrite each other's checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

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
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"trainer.default_local_dir={run_dir}: another run is at work there ({file.read().strip()}). Wait for "
                "its end or stop it, or set trainer.experiment_name or trainer.default_local_dir to another place"
            ) from None
        except OSError as error:
            logger.warning("%s: no lock (%s): take care that no other run works there", run_dir, error)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


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
