"""The flag by which a user says that the code which a run's folder names may run."""

from __future__ import annotations

import argparse

from grpo_dist.config.run_code import FLAG


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Add the flag, as `trust`."""
    what = "run code that the run's config names (the model's own, reward functions), and take its engine arguments"
    parser.add_argument(FLAG, dest="trust", action="store_true", help=what)
