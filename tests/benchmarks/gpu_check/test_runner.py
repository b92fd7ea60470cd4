"""Parts in processes of their own: what runs, what runs again, what is left of one that goes wrong, and the table."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.gpu_check import ranks, results
from benchmarks.gpu_check.__main__ import exit_code, main
from benchmarks.gpu_check.parts import Part
from benchmarks.gpu_check.results import Figure, Findings, Result, largest, table, write_json
from benchmarks.gpu_check.runner import Check, find_setup
from tests.messages import refuses, says

SETUP = {"device": "cpu", "scale": "small", "torch": "1"}
FAKE = "tests.benchmarks.gpu_check.fake_process"


def check(out: Path, *names: str, fresh: bool = False, setup: dict = SETUP) -> list[Result]:
    plain = ("engine", "nowhere:nothing", 20, "says its name")
    parts = [Part(name, *plain, needs_model=name.startswith("reads")) for name in names]
    return Check(out, setup, lambda line: None, FAKE).run(parts, fresh=fresh)


def starts(out: Path) -> list[str]:
    return (out / "cpu-small" / "starts").read_text().splitlines()


def test_a_check_goes_on_where_it_was(tmp_path: Path) -> None:
    """What is done, or did not fit, is not run again; what was skipped or has failed is."""
    names = ["a", "out of memory", "skipped", "failed"]
    first = check(tmp_path, *names)
    ended = ["done", "out of memory", "skipped", "failed"]
    assert [result.status for result in first] == ended
    again = check(tmp_path, *names, "b")
    assert [result.status for result in again] == [*ended, "done"]
    assert starts(tmp_path) == [*names, "skipped", "failed", "b"]
    assert again[0] == first[0]
    written = json.loads((tmp_path / "results.json").read_text())
    assert [found["part"] for found in written["parts"]] == [*names, "b"]
    assert written["setup"] == SETUP


def test_the_record_has_what_earlier_checks_of_this_setup_have_found(tmp_path: Path) -> None:
    for names, setup in ((["matmul", "weights"], SETUP), (["matmul"], SETUP | {"torch": "2"})):
        for name in reversed(names):
            check(tmp_path, name, setup=setup)
        written = json.loads((tmp_path / "results.json").read_text())
        assert [found["part"] for found in written["parts"]] == names
    other = SETUP | {"torch": "2"}
    check(tmp_path, "b", setup=other)
    check(tmp_path, "matmul", fresh=True, setup=other)
    check(tmp_path, "matmul", "b", setup=other)
    assert starts(tmp_path) == ["weights", "matmul", "matmul", "b", "matmul"], "b was not forgotten"


def test_a_part_that_dies_or_hangs_is_reported_and_the_rest_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    died, done = check(tmp_path, "dies", "a")
    assert (died.status, done.status) == ("failed", "done")
    says(died.reason, "exit code", "-9", "dies.log", "last line")
    monkeypatch.setattr(Part, "limit_s", 1)
    (hangs,) = check(tmp_path, "hangs")
    assert hangs.status == "failed"
    says(hangs.reason, "1 s", "ended", "hangs.log")


def test_the_model_is_written_once_for_those_who_read_it_and_taken_away(tmp_path: Path) -> None:
    """At the second try, here, which is no failure; what has its result needs no model again."""
    (tmp_path / "cpu-small").mkdir(parents=True)
    (tmp_path / "cpu-small" / "model fails once").touch()
    for _ in range(2):
        found = check(tmp_path, "model", "reads the model", "reads")
        assert [result.status for result in found] == ["done"] * 3
        assert starts(tmp_path) == ["model", "model", "reads the model", "reads"]
        assert not (tmp_path / "cpu-small" / "model").exists()


def test_where_something_is_missing_nothing_was_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--scale", "small", "--parts", "context", "--out", str(tmp_path)]) == 2
    says(capsys.readouterr().out, "SKIPPED:", "GPU")
    found = json.loads((tmp_path / "cpu-small" / "context.json").read_text())
    assert (found["status"], found["setup"]) == ("skipped", find_setup("cpu", "small"))


def test_parts_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (["--parts", "matmul,nothing"], ["nothing", "model, context, matmul"]),
        (["--parts", "matmul", "--layer", "whole"], ["--layer whole", "--parts"]),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        says(capsys.readouterr().err, *told)


# --- verdicts and the table ------------------------------------------------------------------------------------------
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
    assert largest([0.1, 0.3, 0.2]) == 0.3
    assert math.isnan(largest([0.2, float("nan")])), "`max` gives 0.2 here"


def test_exit_codes() -> None:
    done, skipped, failed = (Result("a", status, {}) for status in ("done", "skipped", "failed"))
    figures = [(Figure("x", 1.0, met=met), Figure("y", None)) for met in (False, True)]
    wrong, right = (Result("a", "done", {}, figures=each) for each in figures)
    assert exit_code([done, skipped, right]) == 0
    for bad in (failed, wrong, Result("a", "out of memory", {})):
        assert exit_code([done, bad]) == 1
    assert exit_code([skipped, skipped]) == 2


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
    figures = (Figure("rate", 12345.6, "GB/s"), Figure("share", 0.21, "", ">= 0.25", False))
    found = [
        Result("one", "done", {}, figures=figures),
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


# --- processes that work on one part together ------------------------------------------------------------------------
def ends(store: dist.TCPStore, rank: int, *, how: str) -> None:
    if rank == 1 and how == "error":
        raise ValueError("no memory")
    if rank == 1 and how == "exit":
        os._exit(3)
    time.sleep(600)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("how", "limit_s", "told"),
    [("error", 100.0, ["rank 1", "ValueError", "no memory"]), ("exit", 100.0, ["rank 1", "3"]), ("", 1.0, ["rank 0"])],
    ids=["an error", "an end without a result", "too late"],
)
def test_a_rank_that_fails_is_reported_at_once(how: str, limit_s: float, told: list[str]) -> None:
    started = time.monotonic()
    with refuses(RuntimeError, *told):
        ranks.run_ranks(f"{__name__}:ends", [{}, {}], {"how": how}, limit_s)
    assert time.monotonic() - started < 60
