"""`python -m grpo_dist.generate ...`: the same as `grpo-dist generate ...` (cli/generate.py)."""

from __future__ import annotations

import sys

from grpo_dist.cli.entry import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
