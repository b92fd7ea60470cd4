"""`python -m grpo_dist.agents.guard PROGRAM ARGUMENT ...`: a program of another environment that leaves nothing behind.

When it has ended, or the process that started it has, everything that it started is killed (supervisor.py). It
gets the environment variables without those that would lead another Python to this one's packages.
"""

from __future__ import annotations

import os
import sys

from grpo_dist.supervisor import supervised

_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def main(command: list[str]) -> None:
    """Become the program, under a supervisor."""
    supervised(os.open(os.devnull, os.O_RDONLY))
    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.exit(f"{command[0]}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
