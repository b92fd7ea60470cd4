"""The command of supervised fine-tuning (SFT): checks the config and trains.

    python -m grpo_dist.sft model.path=Qwen/Qwen3-0.6B data.train_files=chats.parquet [key=value ...]

See command_line.py for the exit codes.
"""

from __future__ import annotations

import sys

from grpo_dist.command_line import run_command
from grpo_dist.config.supervised import SFT
from grpo_dist.config.supervised_plan import format_plan, format_summary


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these overrides, or those of the command line; returns the exit code."""
    return run_command(
        SFT, arguments, "grpo_dist.trainer.supervised.job:SFT_JOB", plan=format_plan, summary=format_summary
    )


if __name__ == "__main__":
    sys.exit(main())
