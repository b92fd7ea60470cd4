"""`python -m grpo_dist NAME ...` is `grpo-dist NAME ...`."""

from __future__ import annotations

import sys

from grpo_dist.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
