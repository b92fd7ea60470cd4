from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts import overview_curves
from tests.messages import says

DOCS = Path(__file__).parents[2] / "docs"
ROWS = [
    {"step": 0, "val-core/x/acc/mean@1": 0.25},
    {"step": 1, "critic/score/mean": 0.5},
    {"step": 2, "critic/score/mean": 0.7, "val-core/x/acc/mean@1": 0.625},
]
PICTURE = '<svg>\n  <g id="curves" transform="scale(1 -1)">\n{}  </g>\n  <g id="other">\n  </g>\n</svg>\n'


def run_dir(folder: Path) -> str:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(folder)


def test_runs_are_drawn_in_place_of_what_was_there(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    picture.write_text(PICTURE.format("    <polyline/>\n"))
    overview_curves.main([str(picture), run_dir(tmp_path / "one"), run_dir(tmp_path / "two")])
    line = '    <polyline class="curve" points="0,0.25 2,0.625"/>\n'
    dots = '    <path class="points" d="M0,0.25h0M2,0.625h0"/>\n'
    assert picture.read_text() == PICTURE.format((line + dots) * 2)


def test_a_picture_without_a_place_for_them_is_refused(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    picture.write_text("<svg></svg>\n")
    with pytest.raises(SystemExit) as refused:
        overview_curves.main([str(picture), run_dir(tmp_path / "one")])
    says(str(refused.value), str(picture), '<g id="curves">')
    assert picture.read_text() == "<svg></svg>\n"


def test_the_picture_has_the_figures_of_the_docs() -> None:
    """The table of docs/performance.md, runs without staleness: seed, then accuracy at step 5, 10, 15, 20 and 25."""
    rows = re.findall(r"^\| 0 \| \d \| ([\d. |]+?) \| 0 \| 0 \|$", (DOCS / "performance.md").read_text(), re.MULTILINE)
    measured = [[0.325, *map(float, row.split(" | "))] for row in rows]
    lines = re.findall(r'<polyline class="curve" points="(.*?)"', (DOCS / "images" / "overview.svg").read_text())
    drawn = [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]
    assert len(drawn) == 3
    assert drawn == [list(zip(range(0, 26, 5), row, strict=True)) for row in measured]
