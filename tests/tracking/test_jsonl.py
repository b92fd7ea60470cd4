"""What becomes of the record of an earlier run in a folder."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.tracking.base import RunInfo, build_trackers
from grpo_dist.tracking.jsonl import (
    JsonlTracker,
    drop_rollouts_after,
    read_metrics,
    readable_metrics,
    set_aside,
    truncate_after,
)
from grpo_dist.tracking.rollouts import recorded_steps
from tests.messages import refuses, says


def run_info(run_dir, resumed_step=None):
    return RunInfo(run_dir=run_dir, project_name="p", experiment_name="e", config={}, resumed_step=resumed_step)


def write_steps(path, steps):
    path.write_text("".join(json.dumps({"step": step, "loss": step / 2}) + "\n" for step in steps))


def test_each_line_is_on_disk_at_once(tmp_path):
    tracker = JsonlTracker(run_info(tmp_path))
    tracker.log({"loss": 0.5, "n": 3}, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.5, "n": 3}\n'
    tracker.log({"loss": 0.25}, 2)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    tracker.close()


def test_lines_wait_while_the_disk_is_full(tmp_path, caplog):
    """Part of a line may be on it by then."""
    tracker = JsonlTracker(run_info(tmp_path))
    tracker.log({"loss": 1.0}, 1)
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 5, hard))
    try:
        tracker.log({"loss": 2.0}, 2)
        tracker.log({"loss": 3.0}, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caplog.records) == 1
    says(caplog.text, tmp_path / "metrics.jsonl", "written")
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    tracker.log({"loss": 4.0}, 4)
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    tracker.close()


def test_non_finite_numbers_are_null_on_disk_and_nan_when_read(tmp_path):
    tracker = JsonlTracker(run_info(tmp_path))
    tracker.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}, 1)
    tracker.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "a": null, "b": null, "c": null, "d": 1.0}\n'
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(row["a"])
    assert math.isnan(row["b"])
    assert row["d"] == 1.0


def test_truncate_after_keeps_steps_up_to_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [0, 1, 2, 3, 4, 5])
    truncate_after(path, 3)
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    truncate_after(tmp_path / "absent.jsonl", 3)
    assert not (tmp_path / "absent.jsonl").exists()


@pytest.mark.parametrize(
    "tail", [b'{"step": 3, "lo', b'{"step": 3, "name": "\xc3', b"\x00\x00\x00", b'{"step": 3, "loss": 1.5']
)
def test_half_written_last_line_is_removed(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2])
    with path.open("ab") as file:
        file.write(tail)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    truncate_after(path, 10)
    assert path.read_text() == '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 1.0}\n'


def test_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    truncate_after(path, 10)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("bad", ["not json", "[1]", '{"loss": 1}', '{"step": "2"}'])
def test_bad_line_in_the_middle_is_not_dropped_silently(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n')
    before = path.read_bytes()
    with refuses(ConfigError, "metrics.jsonl, line 2"):
        truncate_after(path, 10)
    assert path.read_bytes() == before


def test_resumed_run_has_each_step_once(tmp_path):
    names = {"project_name": "p", "experiment_name": "e", "config": {}}
    first = build_trackers([], RunInfo(run_dir=tmp_path, resumed_step=None, **names))
    for step in range(6):
        first.log({"loss": 1.0}, step)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    second = build_trackers([], RunInfo(run_dir=tmp_path, resumed_step=3, **names))
    for step in range(4, 8):
        second.log({"loss": 2.0}, step)
    second.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(8))
    assert [row["loss"] for row in rows] == [1.0] * 4 + [2.0] * 4


def test_lines_of_one_step_are_read_as_one_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 1, "val": null}\n{"step": 2, "a": 2}\n{"step": 2, "val": 3}\n')
    rows, problems = readable_metrics(path)
    assert problems == []
    assert math.isnan(rows[0].pop("val"))
    assert rows == [{"step": 1, "a": 1}, {"step": 2, "a": 2, "val": 3}]
    truncate_after(path, 1)
    assert path.read_text() == '{"step": 1, "a": 1, "val": null}\n'
    tracker = JsonlTracker(run_info(tmp_path, resumed_step=1))
    tracker.log({"val": 0.5}, 1)  # the validation is made again
    tracker.close()
    assert read_metrics(path) == [{"step": 1, "a": 1, "val": 0.5}]


def test_fresh_start_keeps_the_old_file_aside(tmp_path):
    for value in (1, 2, 3):
        tracker = JsonlTracker(run_info(tmp_path))
        tracker.log({"run": value}, 0)
        tracker.close()
    content = {file.name: json.loads(file.read_text())["run"] for file in tmp_path.iterdir()}
    assert content == {"metrics.jsonl": 3, "metrics.old-1.jsonl": 1, "metrics.old-2.jsonl": 2}


def write(run_dir: Path, *names: str) -> None:
    for name in names:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text(name)


def files(run_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file())


def test_a_run_that_starts_anew_has_none_of_the_steps_of_the_one_before(tmp_path: Path) -> None:
    """Nor its tokenizer. They are kept, under one number."""
    set_aside(tmp_path)
    assert files(tmp_path) == []
    write(tmp_path, "metrics.jsonl", "rollouts/3.jsonl", "rollouts/3.parquet", "validation/0.jsonl", "tokenizer/t.json")
    set_aside(tmp_path)
    assert recorded_steps(tmp_path) == []
    old = ["metrics.old-1.jsonl", "rollouts.old-1/3.jsonl", "rollouts.old-1/3.parquet", "tokenizer.old-1/t.json"]
    assert files(tmp_path) == [*old, "validation.old-1/0.jsonl"]
    write(tmp_path, "rollouts/1.jsonl")  # one that was killed in its first step
    set_aside(tmp_path)
    write(tmp_path, "metrics.jsonl")
    set_aside(tmp_path)
    assert (tmp_path / "rollouts.old-2/1.jsonl").is_file()
    assert (tmp_path / "metrics.old-2.jsonl").is_file()


def test_a_run_that_goes_back_drops_the_steps_after(tmp_path: Path) -> None:
    write(tmp_path, *(f"rollouts/{step}.{end}" for step in (9, 10, 11) for end in ("jsonl", "parquet")))
    write(tmp_path, "validation/11.jsonl", "rollouts/notes.txt")
    drop_rollouts_after(tmp_path, 9)
    assert files(tmp_path) == ["rollouts/9.jsonl", "rollouts/9.parquet", "rollouts/notes.txt"]
