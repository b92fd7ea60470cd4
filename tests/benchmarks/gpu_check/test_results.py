"""Figures, their verdicts, the table, and files that are there whole or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.gpu_check import results
from benchmarks.gpu_check.results import (
    Figure,
    Findings,
    Result,
    all_well,
    largest,
    read_result,
    table,
    write_json,
    write_result,
)
from tests.messages import refuses


def findings(*, holds: bool) -> list[Figure]:
    found = Findings(holds)
    found.right("difference", 0.2, 0.1)
    found.right("not a number", float("nan"), 0.1)
    found.at_least("speed", 0.2, 0.25)
    found.at_most("size", 0.5, 1.0, "GiB")
    found.within("ratio", 1.2, 0.9, 1.1)
    return found.figures


def test_speeds_are_held_against_a_gpu_only_and_correctness_always() -> None:
    assert [figure.met for figure in findings(holds=True)] == [False, False, False, True, False]
    assert [figure.met for figure in findings(holds=False)] == [False, False, None, None, None]
    assert [figure.expected for figure in findings(holds=True)] == ["<= 0.1", "<= 0.1", ">= 0.25", "<= 1", "0.9 to 1.1"]
    assert [figure.expected for figure in findings(holds=False)] == ["<= 0.1", "<= 0.1", "", "", ""]


def test_nan_is_the_largest() -> None:
    """`max` gives 0.2 here."""
    assert largest([0.1, 0.3, 0.2]) == 0.3
    assert max([0.2, float("nan")]) == 0.2
    assert math.isnan(largest([0.2, float("nan")]))


def test_one_miss_is_enough() -> None:
    assert all_well([Result("a", "done", {}, figures=(Figure("x", 1.0, met=True), Figure("y", None)))])
    assert all_well([Result("a", "skipped", {})])
    assert not all_well([Result("a", "done", {}, figures=(Figure("x", 1.0, met=False),))])
    assert not all_well([Result("a", "out of memory", {})])


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    result = Result("a", "done", {"torch": "2"}, "", 1.5, (Figure("x", 2.0, "s", "<= 3", True, "n"), Figure("y", None)))
    write_result(tmp_path, result)
    assert read_result(tmp_path, "a", {"torch": "2"}) == result
    assert read_result(tmp_path, "a", {"torch": "3"}) is None
    assert read_result(tmp_path, "b", {"torch": "2"}) is None


def test_a_file_that_cannot_be_finished_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "a.json"
    write_json(path, {"a": 1})

    def dies(self: Path, text: str, encoding: str) -> None:
        self.open("w").write(text[:3])
        raise OSError("no space left")

    monkeypatch.setattr(results.Path, "write_text", dies)
    with refuses(OSError, "space left"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


def test_the_table() -> None:
    found = [
        Result(
            "one", "done", {}, figures=(Figure("rate", 12345.6, "GB/s"), Figure("share", 0.21, "", ">= 0.25", False))
        ),
        Result("two", "failed", {}, "line 1\nline 2", figures=(Figure("peak", None, note="on a GPU only"),)),
        Result("three", "skipped", {}, "x" * 400),
    ]
    lines = table(found).splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["part", "what", "figure", "expected", "verdict"],
        ["one", "rate", "12,346", "GB/s"],
        ["one", "share", "0.21", ">=", "0.25", "MISSED"],
        ["two", "peak", "-", "on", "a", "GPU", "only"],
    ]
    assert lines[4].endswith("FAILED: line 1 line 2")
    assert lines[5].endswith(f"SKIPPED: {'x' * 300} ...")
    assert len({line.index(word) for line, word in zip(lines[:3], ("figure", "12,346", "0.21"), strict=True)}) == 1
