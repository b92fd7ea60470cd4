"""Nothing that a reward function or another process of ours has started outlives it, supervised or watched."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from grpo_dist import keeper
from grpo_dist.rewards.contract import Failure, Sample
from grpo_dist.rewards.scorer import Scorer

STARTING = """
import os, subprocess, time

HOW = {
    "child": ["sleep", "1000"],
    "session": ["setsid", "sleep", "1000"],
    "daemon": ["sh", "-c", "setsid sh -c 'sleep 1000 & sleep 1000' & exit"],
}

def compute_score(data_source, solution_str, ground_truth, extra_info, fifo):
    how, end = solution_str.split(maxsplit=1)
    with open(fifo, "wb") as held:
        process = subprocess.Popen(HOW[how], stdin=subprocess.DEVNULL, stdout=held, stderr=subprocess.DEVNULL)
    if how == "daemon":
        process.wait()
    if end == "hangs":
        time.sleep(1000)
    if end == "exits":
        os._exit(3)
    if end == "kills its group":
        os.killpg(0, 9)
    return 1.0
"""
PARENT = """
import os, psutil, sys
from grpo_dist.rewards.contract import Sample
from grpo_dist.rewards.scorer import Scorer

scorer = Scorer(sys.argv[1], "compute_score", {"fifo": sys.argv[2]}, timeout_s=60.0)
scorer.score([Sample("daemon returns", "source", "truth", {}, [])])
me = psutil.Process()
(outer,) = me.children()
(inner,) = outer.children()
"""
# What the parent does last, without stopping the scorer.
ENDS = {
    "it is killed": "me.kill()",
    "it kills its children, as a Ray worker does": "outer.kill(); os._exit(0)",
    "the inner supervisor is killed": "inner.kill(); sys.stdin.read()",
    "the outer supervisor is killed": "outer.kill(); sys.stdin.read()",
}


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A named pipe for processes to hold, and its end that is read."""
    fifo = str(tmp_path / "held")
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(end, True)
    yield fifo, end
    os.close(end)


@pytest.fixture
def starting(tmp_path: Path, pipe: tuple[str, int]) -> tuple[str, str, int]:
    """A function that starts processes, a pipe that they hold, and its other end."""
    (tmp_path / "starting.py").write_text(STARTING)
    return str(tmp_path / "starting.py"), *pipe


@pytest.mark.deep
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["child", "session", "daemon"])
@pytest.mark.parametrize("end", ["returns", "hangs", "exits", "kills its group"])
def test_what_the_function_has_started_ends_with_it(starting: tuple[str, str, int], how: str, end: str) -> None:
    file, fifo, held = starting
    scorer = Scorer(file, "compute_score", {"fifo": fifo}, timeout_s=3.0 if end == "hangs" else 60.0)
    try:
        (result,) = scorer.score([Sample(f"{how} {end}", "source", "truth", {}, [])])
        assert isinstance(result, Failure) == (end != "returns")
    finally:
        scorer.stop()
    assert os.read(held, 1) == b"", "nobody holds the pipe any more"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", ENDS)
def test_it_ends_with_the_parent_and_with_either_supervisor(starting: tuple[str, str, int], end: str) -> None:
    file, fifo, held = starting
    script = PARENT + ENDS[end]
    parent = subprocess.Popen([sys.executable, "-c", script, file, fifo], stdin=subprocess.PIPE)
    assert os.read(held, 1) == b"", "nobody holds the pipe any more"
    parent.communicate()


# --- a process that is watched and has no supervisor ------------------------------------------------------------------
# It starts a tool, a daemon that does not end when it is told to, and a supervised program with one of its own.
WATCHED = """
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
WATCHED_ENDS = {
    "it is killed": "os.kill(os.getpid(), 9)",
    "it kills its children, as a Ray worker does": "[each.kill() for each in psutil.Process().children()]; os._exit(0)",
    "it ends": "",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", WATCHED_ENDS)
def test_what_a_watched_process_has_started_ends_with_it(pipe: tuple[str, int], end: str) -> None:
    fifo, held = pipe
    subprocess.run([sys.executable, "-c", WATCHED + WATCHED_ENDS[end], fifo], check=False)
    assert os.read(held, 1) == b"", "nobody holds the pipe any more"


def test_what_was_seen_needs_no_mark_and_what_is_another_ones_is_left() -> None:
    other = subprocess.Popen(["sleep", "1000"], env=os.environ | {keeper.MARK: "another"})
    unmarked = subprocess.Popen(["sleep", "1000"], env={"PATH": os.environ["PATH"]})
    seen = psutil.Process(unmarked.pid)
    keeper._end_all("mark", {seen})
    assert not seen.is_running()
    assert other.poll() is None
    other.kill()
    other.wait()
