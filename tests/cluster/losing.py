"""tests/chaos/driver.py for machines, named in `NAMES`: `python -m tests.cluster.losing PLAN.json COMMAND ...`."""

import importlib
import os
import sys
from pathlib import Path

import psutil

from tests.chaos.driver import PROCESSES, Fault, Timetable, install
from tests.cluster.machines import lose, pids_on
from tests.observed import command_line

NAMES = "EMULATED_MACHINES"


class Losses(Timetable):
    """Loses machines, and not processes."""

    def victim(self, role: str) -> int | None:
        """The role's last process on the emulated machines."""
        pids = {pid for name in os.environ[NAMES].split() for pid in pids_on(name)}
        here = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        found = [each for each in here if command_line(each).startswith(PROCESSES[role])]
        return max(found, key=lambda each: each.create_time()).pid if found else None

    def send(self, fault: Fault, pid: int) -> None:
        """Lose the machine of a process."""
        lose(next(name for name in os.environ[NAMES].split() if pid in pids_on(name)), cut=fault.signal == "CUT")


if __name__ == "__main__":
    install(Losses(Path(sys.argv[1])), sys.argv[2])
    sys.exit(importlib.import_module(f"grpo_dist.{sys.argv[2]}").main(sys.argv[3:]))
