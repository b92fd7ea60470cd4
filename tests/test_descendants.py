"""Processes whose parent is killed: one ends too, one is taken over by its grandparent."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from tests.observed import assert_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")

SLEEPER = "import os, time; {first}print(os.getpid(), flush=True); time.sleep(600)"
ENDS = "import signal; from grpo_dist.descendants import signal_at_parents_end as ask; ask(signal.SIGKILL); "
STARTER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
ADOPTER = (
    "from grpo_dist.descendants import adopt_orphans; adopt_orphans(); "
    "import subprocess, sys, time; subprocess.Popen(['sh', '-c', sys.argv[1]]); time.sleep(600)"
)


def started(starter: str, *arguments: str) -> tuple[subprocess.Popen, psutil.Process]:
    """A process, and its last descendant."""
    parent = subprocess.Popen([sys.executable, "-c", starter, *arguments], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


def test_a_process_ends_with_the_one_that_started_it() -> None:
    parent, child = started(STARTER, SLEEPER.format(first=ENDS))
    assert child.ppid() == parent.pid
    parent.kill()
    assert_gone({child})


def test_an_orphan_gets_the_parent_that_asked_for_it() -> None:
    """A shell stands between the two, and is killed."""
    shell = f"{sys.executable} -c '{SLEEPER.format(first='')}' & wait"
    parent, orphan = started(ADOPTER, shell)
    between = psutil.Process(orphan.ppid())
    assert between.ppid() == parent.pid
    between.kill()
    while orphan.ppid() == between.pid:
        time.sleep(0.01)
    assert orphan.ppid() == parent.pid
    orphan.kill()
    parent.kill()
