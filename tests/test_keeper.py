"""Nothing that a process has started outlives it, though it has no supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from grpo_dist import keeper

# It starts a tool, a daemon that does not end when it is told to, and a supervised program with one of its own.
STARTER = """
import os, psutil, subprocess, sys
from grpo_dist.keeper import watch

watch()
held = open(sys.argv[1], "wb")
daemon = "trap '' TERM; setsid sh -c \\"trap '' TERM; sleep 1000 & wait; sleep 1000\\" & exit"
for command in (
    ["sleep", "1000"],
    ["sh", "-c", daemon],
    [sys.executable, "-m", "grpo_dist.supervisor", "env", "-i", "/bin/sh", "-c", "sleep 1000 & wait"],
):
    subprocess.Popen(command, stdout=held, start_new_session=True)
held.close()
"""
ENDS = {
    "it is killed": "os.kill(os.getpid(), 9)",
    "it kills its children, as a Ray worker does": "[each.kill() for each in psutil.Process().children()]; os._exit(0)",
    "it ends": "",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", ENDS)
def test_what_a_watched_process_has_started_ends_with_it(tmp_path: Path, end: str) -> None:
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(held, True)
    subprocess.run([sys.executable, "-c", STARTER + ENDS[end], str(fifo)], check=False)
    assert os.read(held, 1) == b"", "nobody holds the pipe any more"
    os.close(held)


def test_what_was_seen_needs_no_mark_and_what_is_another_ones_is_left() -> None:
    other = subprocess.Popen(["sleep", "1000"], env=os.environ | {keeper.MARK: "another"})
    unmarked = subprocess.Popen(["sleep", "1000"], env={"PATH": os.environ["PATH"]})
    seen = psutil.Process(unmarked.pid)
    keeper._end_all("mark", {seen})
    assert not seen.is_running()
    assert other.poll() is None
    other.kill()
    other.wait()
