"""`python -m grpo_dist.keeper MARK` waits for the end of a process without a supervisor, and ends what it has started.

A Ray worker is started by Ray and has threads, so it cannot be forked under a supervisor (supervisor.py). Agents run in
it, and so do the tools and servers that they start. When it ends, Ray kills its direct children at best. The keeper
finds what it started by a mark in the environment, which is inherited from `watch` on, and what was given another
environment by having seen it below the process.

Not found: what has another environment and became a daemon, or was started, within the last `LOOK_S` seconds.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import psutil

MARK = "GRPO_DIST_STARTED_BY"
LOOK_S = 1.0
POLITE_S, END_S = 2.0, 30.0  # until processes that were told to end are killed; until it gives up


def watch() -> None:
    """Have whatever this process starts from now on end with it, in whatever way it ends."""
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    nowhere = subprocess.DEVNULL
    command = [sys.executable, "-m", "grpo_dist.keeper", os.environ[MARK]]
    subprocess.run(command, check=True, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)


def main(mark: str) -> None:
    """Keep watch in a process that is nobody's child, and so outlives the one that is watched."""
    watched = psutil.Process(int(mark.partition("-")[0]))
    if os.fork() > 0:
        return
    seen: set[psutil.Process] = set()
    while watched.is_running() and _lives(watched):
        with contextlib.suppress(psutil.Error):  # it has just ended
            seen = {process for process in seen if process.is_running()} | set(watched.children(recursive=True))
        time.sleep(LOOK_S)
    _end_all(mark, seen)


def _end_all(mark: str, seen: set[psutil.Process]) -> None:
    begun, asked_to_end = time.monotonic(), set[psutil.Process]()
    while (left := _left(mark, seen)) and time.monotonic() < begun + END_S:
        for process in left:
            with contextlib.suppress(psutil.Error):
                if time.monotonic() > begun + POLITE_S:
                    process.kill()
                elif process not in asked_to_end:  # supervisors among them end what is theirs
                    process.terminate()
        asked_to_end |= left
        psutil.wait_procs(left, timeout=0.1)


def _left(mark: str, seen: set[psutil.Process]) -> set[psutil.Process]:
    """The living processes with this mark or among these, and their descendants, but for this one."""
    started = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone, or of another user
            if process in seen or process.environ().get(MARK) == mark:
                started |= {process, *process.children(recursive=True)}
    return set(filter(_lives, started - {psutil.Process()}))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


if __name__ == "__main__":
    main(sys.argv[1])
