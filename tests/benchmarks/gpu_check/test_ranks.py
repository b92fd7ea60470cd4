"""Processes that work on one part together: their environments, results, and what becomes of one that fails."""

from __future__ import annotations

import atexit
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.gpu_check import ranks
from benchmarks.gpu_check.ranks import run_ranks
from tests.messages import refuses


def described(store: dist.TCPStore, rank: int, *, names: list[str]) -> list[Any]:
    """Each waits for the other one."""
    store.set(f"here/{rank}", "")
    store.wait(["here/0", "here/1"])
    return [rank, *(os.environ.get(name) for name in names)]


def ends(store: dist.TCPStore, rank: int, *, how: str) -> None:
    """Rank 1 ends in some way; rank 0 waits for it."""
    if rank == 1 and how == "error":
        raise ValueError("no memory")
    if rank == 1 and how == "exit":
        os._exit(3)
    time.sleep(600)


def run(function: Any, environments: list[dict[str, str]], limit_s: float = 100.0, **arguments: Any) -> list[Any]:
    return run_ranks(f"{__name__}:{function.__name__}", environments, arguments, limit_s)


def test_each_has_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty text removes what this process has."""
    monkeypatch.setenv("GPU_CHECK_A", "inherited")
    found = run(described, [{"GPU_CHECK_B": "own"}, {"GPU_CHECK_A": ""}], names=["GPU_CHECK_A", "GPU_CHECK_B"])
    assert found == [[0, "inherited", "own"], [1, None, None]]


def writes_at_its_end(store: dist.TCPStore, rank: int, *, path: str, forever: bool) -> int:
    """Something that it ends after its result is known: what it has started."""
    atexit.register(time.sleep, 600 if forever else 0.5)
    atexit.register(lambda: Path(path).write_text("ended") if not forever else None)
    return rank


@pytest.mark.deep
@pytest.mark.parametrize("forever", [False, True], ids=["soon", "never"])
def test_processes_may_end_what_they_have_started(
    forever: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 2.0 if forever else 100.0)
    path, started = tmp_path / "ended", time.monotonic()
    assert run(writes_at_its_end, [{}], path=str(path), forever=forever) == [0]
    assert path.exists() is not forever
    assert time.monotonic() - started < 100


@pytest.mark.deep
@pytest.mark.parametrize(
    ("how", "limit_s", "told"),
    [("error", 100.0, ["rank 1", "ValueError", "no memory"]), ("exit", 100.0, ["rank 1", "3"]), ("", 1.0, ["rank 0"])],
    ids=["an error", "an end without a result", "too late"],
)
def test_one_that_fails_is_reported_at_once(how: str, limit_s: float, told: list[str]) -> None:
    """Though another one, whose result would be read before, still waits."""
    started = time.monotonic()
    with refuses(RuntimeError, *told):
        run(ends, [{}, {}], limit_s, how=how)
    assert time.monotonic() - started < 60
