"""A process that outlives its worker only to end whatever the worker has started.

`supervised()` forks: the child goes on as the worker, the parent stays behind as its supervisor. When the worker has
ended, in whatever way, or when the supervisor is told to end (SIGTERM, which the kernel also sends when the process
that started it is gone), it kills all descendants and ends as the worker did. Descendants that became sessions or
daemons of their own are among them: the supervisor is their subreaper (Linux, `man 2 prctl`), so that they cannot be
orphaned away from it.

Not covered: a supervisor that is itself killed by SIGKILL. Its worker then dies too, the worker's subprocesses do not.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator

from grpo_dist.descendants import adopt_orphans, signal_at_parents_end

END_S = 5.0  # for killed processes to be gone
_AWAITED = {signal.SIGCHLD, signal.SIGTERM}


def supervised(keep: int) -> None:
    """Return in a new child process, the worker; this process becomes its supervisor and does not return.

    To be called before there are threads.

    Args:
        keep: file descriptor that belongs to the worker alone, beside its standard streams.
    """
    signal_at_parents_end(signal.SIGTERM)
    adopt_orphans()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    worker = os.fork()
    if worker == 0:
        signal_at_parents_end(signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os.close(keep)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # whoever reads them learns when the worker has closed them
        os.dup2(nowhere, stream)
    status = _wait_for(worker)
    _kill_children(time.monotonic() + END_S)
    _end_as(status)


def _wait_for(worker: int) -> int:
    """The worker's wait status; that of a killed one where the supervisor is to end first."""
    while signal.sigwait(_AWAITED) != signal.SIGTERM:
        for process, status in _reaped():
            if process == worker:
                return status
    return int(signal.SIGKILL)


def _kill_children(deadline: float) -> None:
    """Kill until there are none; the children of those that are gone have become children of this process."""
    while time.monotonic() < deadline:
        for process in _children():
            try:
                os.kill(process, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # gone, or of another user
                continue
        for _ in _reaped():
            pass
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)


def _children() -> Iterator[int]:
    """The processes whose parent is this one."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:  # it has gone
                continue
            if parent == os.getpid():
                yield int(name)


def _reaped() -> Iterator[tuple[int, int]]:
    """(process, wait status) of the children that have ended."""
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if process == 0:
            return
        yield process, status


def _end_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has left one already, if it is wanted
        end = os.WTERMSIG(status)
        if end != signal.SIGKILL:
            signal.signal(end, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {end})
        os.kill(os.getpid(), end)
    os._exit(os.WEXITSTATUS(status))
