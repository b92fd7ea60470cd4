from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import plot_run

ROWS = [
    {"step": 0, "val-core/x/acc/mean@1": 0.5},
    {"step": 1, "critic/score/mean": 0.5, "response_length/mean": 3.0, "actor/loss": 1.0},
    {"step": 2, "critic/score/mean": 0.7, "response_length/mean": 4.0, "actor/loss": 0.5, "val-core/x/acc/mean@1": 0.6},
]


@pytest.mark.parametrize("metrics", [(), ("--metric", "actor/loss")])
def test_runs_are_drawn(tmp_path: Path, metrics: tuple[str, ...]) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    out = tmp_path / "curves.png"
    plot_run.main([str(out), str(tmp_path / "one"), str(tmp_path / "two"), *metrics])
    assert out.read_bytes().startswith(b"\x89PNG")
