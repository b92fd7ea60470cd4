"""Limits of CPU time and memory for a piece of a scorer's work, which the scorer survives.

A reward process is killed when `reward.timeout_s` is over, and its response has failed: that is for functions that
hang. Work that the response alone makes costly, such as 9^{9^9} for an answer, is no failure but a wrong answer: the
scorer does it within limits of its own.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

AGAIN_S = 0.1  # of CPU time, after which the error is raised again where somebody has caught it


class TooCostly(BaseException):
    """The work went beyond its limits; no `except Exception` of a library in between catches it."""


@contextlib.contextmanager
def limited(*, cpu_s: float, memory_bytes: int) -> Iterator[None]:
    """Run a block with limits; within C code they hold wherever it looks for signals, as Python's integers do.

    Outside the main thread of a process, where Python runs no signal handlers, only the memory is limited.

    Args:
        cpu_s: CPU time of the process, all of its threads.
        memory_bytes: address space beyond what the process has now.

    Raises:
        TooCostly: the block went beyond the CPU time, or raised MemoryError.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    if before[0] != resource.RLIM_INFINITY:
        most = min(most, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        with _alarm(cpu_s) if threading.current_thread() is threading.main_thread() else contextlib.nullcontext():
            yield
    except MemoryError:
        raise TooCostly from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def _alarm(cpu_s: float) -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise TooCostly

    before = signal.signal(signal.SIGPROF, end)
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_s, AGAIN_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    finally:  # also where the alarm came on the way out
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
