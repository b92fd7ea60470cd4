"""Ties the end of processes to that of others: of their parents, and of a worker by supervisors that outlive it.

Supervisors end whatever the worker has started.

`under_supervisors()` forks: the child goes on as the worker, the parent stays behind as its supervisor. When the worker
has ended, in whatever way, or when the supervisor is told to end (SIGTERM, which the kernel also sends when the process
that started it is gone), it kills all descendants and ends as the worker did. Descendants that became sessions or
daemons of their own are among them: the supervisor is their subreaper (Linux, `man 2 prctl`), so that they cannot be
orphaned away from it.

There are two, the second one a child of the first, since a supervisor may be killed too: a Ray worker that ends kills
its direct children (SIGKILL). If the first one is killed, the second one is told; if the second one is, the first one
adopts what is left. Worker and supervisors are sessions of their own, so that no signal to a group reaches two of them.

`python -m grpo_dist.supervisor PROGRAM ARGUMENT ...` runs a program of another environment so that it leaves nothing
behind. It gets the environment variables without those that would lead another Python to this one's packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# The state letters of /proc/PID/stat.
STATES = {"R": "running", "S": "waiting", "D": "waiting for a disk", "T": "stopped", "t": "stopped"}
STATES |= {"Z": "dead", "X": "dead"}

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux; elsewhere nothing is tied
END_S = 5.0  # for killed processes to be gone
_OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_AWAITED = {signal.SIGCHLD, signal.SIGTERM}


def signal_at_parents_end(number: int) -> None:
    """Have the kernel send this process signal `number` when the thread that started it ends for any reason."""
    _prctl(_PR_SET_PDEATHSIG, number)


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
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def under_supervisors(keep: int) -> None:
    """Return in a new process, the worker; this process becomes its first supervisor and does not return.

    To be called before there are threads. `keep` is a file descriptor that belongs to the worker alone, beside its
    standard streams.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    signal_at_parents_end(signal.SIGTERM)
    _stay_behind(keep, signal.SIGTERM)
    _stay_behind(keep, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stay_behind(keep: int, at_its_end: int) -> None:
    """Return in a child, which gets the signal `at_its_end` when this process, its supervisor, has ended."""
    adopt_orphans()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        signal_at_parents_end(at_its_end)
        if os.getppid() != parent:  # it had already ended
            os._exit(1)
        os.setsid()
        return
    os.close(keep)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # whoever reads them learns when the worker has closed them
        os.dup2(nowhere, stream)
    status = _wait_for(child)
    _kill_children(time.monotonic() + END_S)
    _end_as(status)


def _wait_for(child: int) -> int:
    """Wait for the child; its wait status, or that of a killed one where the supervisor is to end first."""
    while signal.sigwait(_AWAITED) != signal.SIGTERM:
        for process, status in _reaped():
            if process == child:
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


def process_state(pid: int) -> str:
    """One of "running", "waiting", "stopped", "dead" and "gone"; "unknown" on machines without /proc."""
    if not Path("/proc/self/stat").exists():
        return "unknown"
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return STATES.get(letter, "waiting")


def is_alive(pid: int) -> bool:
    """Tell if a process is alive and holds its memory; a zombie does not."""
    try:
        return process_state(pid) not in ("dead", "gone")
    except PermissionError:  # it is another user's
        return True


def own_prefix(prefix: str) -> str:
    """Return how the names of this process's temporary folders begin, for `left_behind` should it be killed."""
    return f"{prefix}-{_pid_namespace()}-{os.getpid()}-"


def left_behind(prefix: str, place: Path) -> Iterator[Path]:
    """Yield the folders of dead processes of this user."""
    for folder in place.glob(f"{prefix}-{_pid_namespace()}-*"):
        pid = folder.name.removeprefix(f"{prefix}-{_pid_namespace()}-").partition("-")[0]
        with contextlib.suppress(FileNotFoundError):  # another process clears too
            if pid.isdecimal() and folder.stat().st_uid == os.getuid() and not is_alive(int(pid)):
                yield folder


def _pid_namespace() -> int:
    """Containers may share folders but not the process ids: processes of another container must not seem dead."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _children() -> Iterator[int]:
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


def main(command: list[str]) -> None:
    """Become the program, under supervisors."""
    under_supervisors(os.open(os.devnull, os.O_RDONLY))
    environment = {name: value for name, value in os.environ.items() if name not in _OF_THIS_PYTHON}
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.exit(f"{command[0]}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
