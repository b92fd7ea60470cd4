"""What a run records in its folder, and what becomes of that where another one begins, or goes back to an earlier step.

The steps in `metrics.jsonl` are those of the run, and so are the files of `rollouts/` (rollouts.py) and `validation/`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

METRICS, ROLLOUTS, VALIDATION, TOKENIZER = "metrics.jsonl", "rollouts", "validation", "tokenizer"


def set_aside(run_dir: Path) -> None:
    """Rename what an earlier run in this folder has recorded: `metrics.old-N.jsonl`, `rollouts.old-N` and so on."""
    places = [run_dir / name for name in (METRICS, ROLLOUTS, VALIDATION, TOKENIZER)]
    there = [path for path in places if path.is_dir() or (path.is_file() and path.stat().st_size)]
    for number in itertools.count(1):
        old = {path: path.with_name(f"{path.stem}.old-{number}{path.suffix}") for path in there}
        if not any(path.exists() for path in old.values()):
            break
    for path, new in old.items():
        path.rename(new)


def drop_rollouts_after(run_dir: Path, step: int) -> None:
    """Remove the rollouts of later steps, from which the run has gone back."""
    for name in (ROLLOUTS, VALIDATION):
        for path in (run_dir / name).glob("*"):
            if path.stem.isdecimal() and int(path.stem) > step:
                path.unlink()
