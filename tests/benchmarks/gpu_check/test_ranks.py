"""Processes that work on one part together: their environments, results, and what becomes of one that fails."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch.distributed as dist

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
