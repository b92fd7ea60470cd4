"""Processes as psutil sees them; they may end at any moment. Imports no Ray: tests/conftest.py uses it first."""

import psutil


def command_line(process: psutil.Process) -> str:
    """A process's command line; of one that has ended by now, none."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def assert_gone(processes: set[psutil.Process], *, within_s: float = 60) -> None:
    """The processes end."""
    _, alive = psutil.wait_procs(list(processes), timeout=within_s)
    left = [text for text in map(alive_as, alive) if text]
    assert not left, f"left running: {left}"


def alive_as(process: psutil.Process) -> str:
    """The beginning of a process's command line; nothing of one that has ended, or waits to be taken note of."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline()[:3]) or process.name()
    except psutil.Error:
        return ""
