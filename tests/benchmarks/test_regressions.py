"""What is a regression, and what is said where there is nothing to compare with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record, regressions
from benchmarks.regressions import BETTER, GONE, NEW, WORSE, compare, expected, has_failed, report
from tests.messages import says

HEAD = {"machine": {"cores": 2, "load": [0.1], "torch": "2.13"}, "commit": "0123456789abcdef", "dirty": False}


def verdicts(now: dict[str, float], then: dict[str, float]) -> dict[str, str]:
    return {row["ratio"]: row[""] for row in compare(now, then)}


def test_higher_is_better_and_a_fifth_is_tolerated() -> None:
    then = {"a": 1.0, "b": 1.0, "c": 0.5, "d": 2.0, "e": 100.0}
    now = {"a": 0.79, "b": 0.81, "c": 0.5, "d": 2.5, "e": 80.0}
    assert verdicts(now, then) == {"a": WORSE, "b": "", "c": "", "d": BETTER, "e": ""}
    assert [row["change"] for row in compare(now, then)] == ["-21%", "-19%", "+0%", "+25%", "-20%"]


@pytest.mark.parametrize(
    ("now", "verdict", "failed"),
    [(0.7, WORSE, True), (float("nan"), WORSE, True), (None, GONE, True), (5.0, BETTER, False), (1.0, "", False)],
)
def test_only_what_is_worse_or_gone_fails(now: float | None, verdict: str, failed: bool) -> None:
    rows = compare({} if now is None else {"a": now}, {"a": 1.0})
    assert [row[""] for row in rows] == [verdict]
    assert has_failed(rows) is failed


def test_a_new_ratio_is_no_regression() -> None:
    assert verdicts({"a": 1.0, "b": 0.01}, {"a": 1.0}) == {"a": "", "b": NEW}


def test_a_part_is_compared_with_its_own_ratios() -> None:
    baselines = {"AVX2": {"ratios": {"head/time": 1.0, "update/x": 0.2}}, "AVX512": {"ratios": {"head/time": 3.0}}}
    assert expected("AVX2", baselines, ["head"]) == {"head/time": 1.0}
    assert expected("AVX512", baselines, ["head", "update"]) == {"head/time": 3.0}
    assert expected("AVX512_BF16", baselines, ["head"]) == {}


def test_without_a_baseline_of_this_kind_that_is_said_and_nothing_fails() -> None:
    text = report("AVX512", HEAD, {"head/time": 0.1}, {"AVX2": HEAD | {"ratios": {"head/time": 1.0}}}, ["head"])
    says(text, "AVX512", "AVX2", "make bench-baseline")
    assert WORSE not in text
    assert not has_failed(compare({"head/time": 0.1}, {}))


def run(monkeypatch: pytest.MonkeyPatch, now: dict[str, float], *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["regressions", *arguments])
    monkeypatch.setattr(regressions, "measure", lambda parts: now)
    monkeypatch.setattr(record, "capability", lambda: "AVX2")
    regressions.main()


def test_the_command_writes_its_kinds_part_and_fails_for_a_regression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baseline.json"
    monkeypatch.setattr(regressions, "BASELINE", file)
    run(monkeypatch, {"head/time": 0.01})  # no baseline at all
    assert not file.exists()
    other: dict[str, Any] = {"AVX512": HEAD | {"ratios": {"head/time": 9.0}}}
    file.write_text(json.dumps(other))
    run(monkeypatch, {"head/time": 1.0}, "--write")
    written = json.loads(file.read_text())
    assert written["AVX512"] == other["AVX512"]
    assert written["AVX2"]["ratios"] == {"head/time": 1.0}
    assert {"machine", "commit", "dirty"} < written["AVX2"].keys()
    run(monkeypatch, {"head/time": 0.9})
    assert "REGRESSION" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, {"head/time": 0.5})
    assert caught.value.code == 1
    assert "REGRESSION" in capsys.readouterr().out
    assert json.loads(file.read_text()) == written


@pytest.mark.parametrize("arguments", [("--write", "head"), ("heads",)])
def test_wrong_arguments_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(regressions, "measure", lambda parts: pytest.fail("measured"))
    monkeypatch.setattr(sys, "argv", ["regressions", *arguments])
    with pytest.raises(SystemExit) as caught:
        regressions.main()
    assert caught.value.code == 2


def test_the_committed_baselines_hold_ratios_of_the_parts() -> None:
    for kind, baseline in json.loads(regressions.BASELINE.read_text()).items():
        assert {name.partition("/")[0] for name in baseline["ratios"]} == set(regressions.PARTS), kind
        assert all(value > 0 for value in baseline["ratios"].values()), kind
