"""What the tests of several trackers share: a run that one of them is started for, what it logs, and a sample."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

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


def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Refuse every connection, and every question for an address, from now on; returns those that are tried."""
    tried: list[Any] = []

    def refuse(*target: Any, **_: Any) -> NoReturn:
        tried.append(target)
        raise ConnectionRefusedError(f"no network: {target}")

    for name in ("socket.connect", "socket.connect_ex", "getaddrinfo"):
        monkeypatch.setattr(f"socket.{name}", refuse)
    return tried
