"""`grpo-dist report`: the file that it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.cli.entry import main
from tests.messages import says
from tests.report.runs import write_run, write_step
from tests.report.test_page import data_in


def test_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [{"step": step, "critic/score/mean": 0.5} for step in (1, 2, 3)])
    other = write_run(tmp_path / "other", [{"step": 1, "critic/score/mean": 0.1}])
    for step in (1, 2, 3):
        write_step(run, step, ["#### 1", "2"], [1.0, 0.0])
    assert main(["report", str(run), "--compare", str(other), "--responses", "4"]) == 0
    out = capsys.readouterr().out
    says(out, run / "report.html", "--responses")
    assert [line.split("; ")[0].split(": ")[1] for line in out.splitlines()[:2]] == ["steps 3", "steps 1"], "each run"
    written = (run / "report.html").read_text()
    assert "<dt>steps</dt><dd>3</dd>" in written.partition("<noscript>")[2].partition("</noscript>")[0]
    data = data_in(written)
    assert data.keys() == {"overview", "step-1", "step-3"}
    assert data["step-3"]["pieces"]
    assert len(data["overview"]["charts"][0]["figure"]["data"]) == 2
    assert main(["report", str(run), "--output", str(tmp_path / "here.html")]) == 0
    assert data_in((tmp_path / "here.html").read_text()).keys() == {"overview", "step-1", "step-2", "step-3"}


def test_mistakes_of_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    says(capsys.readouterr().err, tmp_path, "metrics.jsonl")
    run = write_run(tmp_path / "run", [{"step": 1, "critic/score/mean": 0.5}])
    assert main(["report", str(run), "--output", str(tmp_path / "no" / "where.html")]) == 2
    says(capsys.readouterr().err, f"--output {tmp_path / 'no' / 'where.html'}")
