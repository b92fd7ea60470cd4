"""`python -m grpo_dist.eval ...`: the same as `grpo-dist eval ...` (cli/evaluate.py)."""

from __future__ import annotations

import sys

from grpo_dist.cli.entry import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
