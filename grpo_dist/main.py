"""The command that runs GRPO: checks the config and trains.

    python -m grpo_dist.main algorithm.adv_estimator=grpo [key=value ...]

See command_line.py for the exit codes.
"""

from __future__ import annotations

import sys

from grpo_dist.command_line import run_command
from grpo_dist.config.grpo import GRPO
from grpo_dist.config.plan import format_plan, format_summary


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these overrides, or those of the command line; returns the exit code."""
    return run_command(GRPO, arguments, "grpo_dist.trainer.grpo:GRPO_JOB", plan=format_plan, summary=format_summary)


if __name__ == "__main__":
    sys.exit(main())
