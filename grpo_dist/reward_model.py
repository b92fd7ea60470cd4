"""The command that trains a reward model: checks the config and trains.

    python -m grpo_dist.reward_model model.path=Qwen/Qwen3-0.6B data.train_files=pairs.parquet [key=value ...]

See command_line.py for the exit codes.
"""

from __future__ import annotations

import sys

from grpo_dist.command_line import run_command
from grpo_dist.config.supervised import REWARD_MODEL
from grpo_dist.config.supervised_plan import format_plan, format_summary


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these overrides, or those of the command line; returns the exit code."""
    job = "grpo_dist.trainer.supervised.job:REWARD_MODEL_JOB"
    return run_command(REWARD_MODEL, arguments, job, plan=format_plan, summary=format_summary)


if __name__ == "__main__":
    sys.exit(main())
