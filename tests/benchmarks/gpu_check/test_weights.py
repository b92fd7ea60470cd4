"""Seconds and rates of what moves between the GPU's memory and the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.gpu_check import weights
from benchmarks.gpu_check.results import Findings
from benchmarks.gpu_check.scale import SCALES
from benchmarks.gpu_check.work import Work


def test_each_way_has_its_median_and_its_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three round trips, of 2, 5 and 3 seconds there, and 1, 1 and 9 back; the blocks between them do not count."""
    clock, steps = [0.0], iter([2.0, 1.0, 5.0, 1.0, 3.0, 9.0])
    monkeypatch.setattr(weights.time, "perf_counter", lambda: clock[0])

    @contextmanager
    def on_device() -> Iterator[None]:
        clock[0] += next(steps)
        yield
        clock[0] += next(steps)

    work = Work("cpu", SCALES["small"], tmp_path, Findings(holds=False))
    weights.note_ways(work, "weights", 6_000_000_000, on_device)
    assert [(figure.what, figure.value, figure.unit) for figure in work.found.figures] == [
        ("weights to the GPU", 3.0, "s"),
        ("weights to the GPU", 2.0, "GB/s"),
        ("weights to CPU memory", 1.0, "s"),
        ("weights to CPU memory", 6.0, "GB/s"),
    ]
    assert [figure.note for figure in work.found.figures][::2] == ["5.59 GiB"] * 2


def test_what_does_not_come_back_is_not_measured(tmp_path: Path) -> None:
    @contextmanager
    def on_device() -> Iterator[None]:
        yield
        raise RuntimeError("no room in CPU memory")

    work = Work("cpu", SCALES["small"], tmp_path, Findings(holds=False))
    with pytest.raises(RuntimeError, match="no room"):
        weights.note_ways(work, "weights", 1, on_device)
    assert work.found.figures == []
