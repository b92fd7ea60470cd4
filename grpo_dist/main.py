"""The commands that train: each checks its config, and runs its job.

    python -m grpo_dist.main algorithm.adv_estimator=grpo [key=value ...]        also grpo-dist train
    grpo-dist sft, grpo-dist reward-model                                        one model on rows with known answers

`plan/commands.py` has a row for each of them; see run/command_line.py for the exit codes.
"""

from __future__ import annotations

import sys

from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT
from grpo_dist.run.command_line import run_command


def main(arguments: list[str] | None = None) -> int:
    """Train a policy with these overrides, or those of the command line; returns the exit code."""
    return run_command(GRPO, arguments)


def sft(arguments: list[str] | None = None) -> int:
    """Fine-tune a model on conversations; returns the exit code."""
    return run_command(SFT, arguments)


def reward_model(arguments: list[str] | None = None) -> int:
    """Train a reward model; returns the exit code."""
    return run_command(REWARD_MODEL, arguments)


if __name__ == "__main__":
    sys.exit(main())
