"""`python -m grpo_dist.serve ...`: the same as `grpo-dist serve ...` (cli/serve.py)."""

from __future__ import annotations

import sys

from grpo_dist.cli.entry import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
