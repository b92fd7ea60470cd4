"""Parts in processes of their own: what is run, what is run again, and what is left of a part that goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_check.__main__ import exit_code, main
from benchmarks.gpu_check.parts import Part
from benchmarks.gpu_check.results import Result
from benchmarks.gpu_check.runner import Check, find_setup
from tests.messages import says

SETUP = {"device": "cpu", "scale": "small", "torch": "1"}
FAKE = "tests.benchmarks.gpu_check.fake_process"


def part(name: str, **options: object) -> Part:
    return Part(name, "engine", "nowhere:nothing", 20, "says its name", **options)  # type: ignore[arg-type]


def check(out: Path, *names: str, fresh: bool = False, setup: dict = SETUP, **options: object) -> list[Result]:
    parts = [part(name, **options) for name in names]
    return Check(out, setup, lambda line: None, FAKE).run(parts, fresh=fresh)


def starts(out: Path) -> list[str]:
    return (out / "cpu-small" / "starts").read_text().splitlines()


def test_a_check_goes_on_where_it_was(tmp_path: Path) -> None:
    """What is done, or did not fit, is not run again; what was skipped or has failed is."""
    names = ["a", "out of memory", "skipped", "failed"]
    assert [result.status for result in check(tmp_path, *names)] == ["done", "out of memory", "skipped", "failed"]
    again = check(tmp_path, *names, "b")
    assert [result.status for result in again] == ["done", "out of memory", "skipped", "failed", "done"]
    assert starts(tmp_path) == [*names, "skipped", "failed", "b"]
    assert again[0].figures[0].value == 1.5
    written = json.loads((tmp_path / "results.json").read_text())
    assert [found["part"] for found in written["parts"]] == [*names, "b"]
    assert written["setup"] == SETUP


def test_the_record_has_what_earlier_checks_have_found(tmp_path: Path) -> None:
    check(tmp_path, "weights")
    check(tmp_path, "matmul")
    written = json.loads((tmp_path / "results.json").read_text())
    assert [found["part"] for found in written["parts"]] == ["matmul", "weights"]
    check(tmp_path, "matmul", setup=SETUP | {"torch": "2"})
    written = json.loads((tmp_path / "results.json").read_text())
    assert [found["part"] for found in written["parts"]] == ["matmul"]


def test_fresh_forgets_and_another_setup_does_not_count(tmp_path: Path) -> None:
    check(tmp_path, "a")
    check(tmp_path, "a", setup=SETUP | {"torch": "2"})
    assert starts(tmp_path) == ["a", "a"]
    check(tmp_path, "b", setup=SETUP | {"torch": "2"})
    check(tmp_path, "a", fresh=True, setup=SETUP | {"torch": "2"})
    assert starts(tmp_path) == ["a", "a", "b", "a"]
    check(tmp_path, "a", "b", setup=SETUP | {"torch": "2"})
    assert starts(tmp_path) == ["a", "a", "b", "a"], "b was not forgotten"


def test_a_part_that_dies_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    died, done = check(tmp_path, "dies", "a")
    assert died.status == "failed"
    says(died.reason, "exit code", "-9", "dies.log", "last line")
    assert done.status == "done"


def test_a_part_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "limit_s", 1)
    (hangs,) = check(tmp_path, "hangs")
    assert hangs.status == "failed"
    says(hangs.reason, "1 s", "ended", "hangs.log")


def test_the_model_is_written_once_for_those_who_read_it_and_taken_away(tmp_path: Path) -> None:
    results = check(tmp_path, "reads the model", "b", needs_model=True)
    assert [result.status for result in results] == ["done", "done"]
    assert starts(tmp_path) == ["model", "reads the model", "b"]
    assert not (tmp_path / "cpu-small" / "model").exists()
    check(tmp_path, "reads the model", "b", needs_model=True)
    assert starts(tmp_path) == ["model", "reads the model", "b"], "nobody reads it any more"


def test_where_something_is_missing_it_is_said_and_nothing_was_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real process, which loads nothing for that."""
    assert main(["--device", "cpu", "--scale", "small", "--parts", "context", "--out", str(tmp_path)]) == 2
    says(capsys.readouterr().out, "SKIPPED:", "GPU")
    found = json.loads((tmp_path / "cpu-small" / "context.json").read_text())
    assert found["status"] == "skipped"
    assert found["setup"] == find_setup("cpu", "small")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--parts", "matmul,nothing"], ["nothing", "model, context, matmul"]),
        (["--parts", "matmul", "--layer", "whole"], ["--layer whole", "--parts"]),
    ],
)
def test_parts_that_do_not_exist(arguments: list[str], told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    says(capsys.readouterr().err, *told)


def test_exit_codes() -> None:
    done, skipped, failed = (Result("a", status, {}) for status in ("done", "skipped", "failed"))
    assert exit_code([done, skipped]) == 0
    assert exit_code([done, failed]) == 1
    assert exit_code([skipped, skipped]) == 2


def test_a_model_that_comes_at_the_second_try_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "cpu-small").mkdir(parents=True)
    (tmp_path / "cpu-small" / "model fails once").touch()
    results = Check(tmp_path, SETUP, lambda line: None, FAKE).run(
        [part("model"), part("reads the model", needs_model=True)], fresh=False
    )
    assert [(result.part, result.status) for result in results] == [("model", "done"), ("reads the model", "done")]
    assert starts(tmp_path) == ["model", "model", "reads the model"]
