"""What the kernel does for processes and their descendants (Linux, `man 2 prctl`). Elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def signal_at_parents_end(number: int) -> None:
    """Have the kernel send this process that signal when the thread that started it has ended, in whatever way."""
    _prctl(PR_SET_PDEATHSIG, number)


def end_with_parent() -> None:
    """Have this process killed when the thread that started it has ended, if it is a process of multiprocessing's."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent.pid:  # it had ended before
        os._exit(1)


def adopt_orphans() -> None:
    """Have descendants become children of this process when their own parents are gone."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
