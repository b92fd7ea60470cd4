"""Ties the lifetime of processes to that of their parents (Linux, `man 2 prctl`). Does nothing elsewhere."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def signal_at_parents_end(number: int) -> None:
    """Have the kernel send this process signal `number` when the thread that started it ends for any reason."""
    _prctl(PR_SET_PDEATHSIG, number)


def end_with_parent() -> None:
    """Have this process, if multiprocessing started it, killed when the thread that started it ends."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent.pid:  # the parent had already ended
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
