"""What the tests of several trackers share: a run that one of them is started for, what it logs, and a sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_dist.tracking.base import RunInfo, Trackers, build_trackers

SCORE = "critic/score/mean"
SAMPLE = {"step": 0, "uid": "val-7", "input": "1+1=?", "output": "#### 2", "gts": "2", "score": 1.0}

Start = Callable[..., Trackers]


def starter(logger: str, run_dir: Path, project: str = "sums") -> Start:
    """Starts a tracker, beside `jsonl`, for a run with this config."""

    def start(resumed_step: int | None = None, **config: Any) -> Trackers:
        names = {"project_name": project, "experiment_name": "first"}
        return build_trackers([logger], RunInfo(run_dir=run_dir, config=config, resumed_step=resumed_step, **names))

    return start


def log(trackers: Trackers, *steps: int, of: int = 8) -> None:
    for step in steps:
        trackers.log({SCORE: step / of}, step)
    assert len(trackers.notes) == 2, "none was dropped"


def eighths(*steps: int) -> list[tuple[int, float]]:
    return [(step, step / 8) for step in steps]
