"""The record in a run's folder: metrics and rollouts, and what becomes of those of an earlier run."""

import json
import math
import resource
from pathlib import Path

import pytest
import torch

from grpo_dist.errors import ConfigError, DiskError
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.fields import FIELDS
from grpo_dist.protocol.parquet import read_parquet
from grpo_dist.tracking.base import RunInfo, build_trackers
from grpo_dist.tracking.jsonl import (
    JsonlTracker,
    drop_rollouts_after,
    read_metrics,
    readable_metrics,
    set_aside,
    truncate_after,
)
from grpo_dist.tracking.rollouts import is_recorded, make_room, recorded_steps, write_tokens
from tests.messages import refuses, says


def run_info(run_dir, resumed_step=None):
    return RunInfo(run_dir=run_dir, project_name="p", experiment_name="e", config={}, resumed_step=resumed_step)


def test_each_line_is_on_disk_at_once_where_numbers_that_are_not_finite_are_null(tmp_path):
    tracker = JsonlTracker(run_info(tmp_path))
    tracker.log({"loss": 0.5, "n": 3, "a": math.nan, "b": math.inf, "c": -math.inf}, 1)
    line = '{"step": 1, "loss": 0.5, "n": 3, "a": null, "b": null, "c": null}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == line
    tracker.log({"loss": 0.25}, 2)
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (second, first["loss"]) == ({"step": 2, "loss": 0.25}, 0.5)
    assert all(math.isnan(first[name]) for name in "abc")
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


WHOLE = '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 1.0}\n'


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b'{"name": "\xc3', b"\x00\x00", b'{"step": 3, "loss": 1.5', None])
def test_half_written_last_line_is_removed(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE.encode()[:-1] if tail is None else WHOLE.encode() + tail)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    truncate_after(path, 10)
    assert path.read_text() == WHOLE
    truncate_after(path, 1)
    assert path.read_text() == WHOLE.splitlines(keepends=True)[0], "steps up to the checkpoint are kept"
    truncate_after(tmp_path / "absent.jsonl", 3)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("bad", ["not json", "[1]", '{"loss": 1}', '{"step": "2"}'])
def test_bad_line_in_the_middle_is_not_dropped_silently(tmp_path, bad):
    path, text = tmp_path / "metrics.jsonl", f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n'
    path.write_text(text)
    with refuses(ConfigError, "metrics.jsonl, line 2"):
        truncate_after(path, 10)
    assert path.read_text() == text


def test_resumed_run_has_each_step_once(tmp_path):
    for resumed_step, steps, loss in ((None, range(6), 1.0), (3, range(4, 8), 2.0)):
        with build_trackers([], run_info(tmp_path, resumed_step)) as trackers:
            for step in steps:
                trackers.log({"loss": loss}, step)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 8, "lo')
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(8))
    assert [row["loss"] for row in rows] == [1.0] * 4 + [2.0] * 4


def test_lines_of_one_step_are_read_as_one_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 1, "val": null}\n{"step": 2, "a": 2}\n{"step": 2, "val": 3}\n')
    rows, problems = readable_metrics(path)
    assert math.isnan(rows[0].pop("val"))
    assert (rows, problems) == ([{"step": 1, "a": 1}, {"step": 2, "a": 2, "val": 3}], [])
    truncate_after(path, 1)
    assert path.read_text() == '{"step": 1, "a": 1, "val": null}\n'
    tracker = JsonlTracker(run_info(tmp_path, resumed_step=1))
    tracker.log({"val": 0.5}, 1)  # the validation is made again
    tracker.close()
    assert read_metrics(path) == [{"step": 1, "a": 1, "val": 0.5}]


def write(run_dir: Path, *names: str) -> None:
    for name in names:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text(name)


def files(run_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file())


def test_a_run_that_starts_anew_has_none_of_the_steps_of_the_one_before(tmp_path: Path) -> None:
    set_aside(tmp_path)
    assert files(tmp_path) == []
    write(tmp_path, "metrics.jsonl", "rollouts/3.jsonl", "rollouts/3.parquet", "validation/0.jsonl", "tokenizer/t.json")
    set_aside(tmp_path)
    assert recorded_steps(tmp_path) == []
    old = ["metrics.old-1.jsonl", "rollouts.old-1/3.jsonl", "rollouts.old-1/3.parquet", "tokenizer.old-1/t.json"]
    assert files(tmp_path) == [*old, "validation.old-1/0.jsonl"]
    write(tmp_path, "rollouts/1.jsonl")  # one that was killed in its first step
    for value in (2, 3):
        tracker = JsonlTracker(run_info(tmp_path))
        tracker.log({"run": value}, 0)
        tracker.close()
    assert (tmp_path / "rollouts.old-2/1.jsonl").is_file()
    found = [json.loads((tmp_path / f"metrics{end}.jsonl").read_text())["run"] for end in ("", ".old-2")]
    assert found == [3, 2]


def test_a_run_that_goes_back_drops_the_steps_after(tmp_path: Path) -> None:
    write(tmp_path, *(f"rollouts/{step}.{end}" for step in (9, 10, 11) for end in ("jsonl", "parquet")))
    write(tmp_path, "validation/11.jsonl", "rollouts/notes.txt")
    drop_rollouts_after(tmp_path, 9)
    assert files(tmp_path) == ["rollouts/9.jsonl", "rollouts/9.parquet", "rollouts/notes.txt"]


# --- the files of rollouts: what is recorded, the tokenizer beside them, and the limit of their size
DATA = DataProto.from_dict({"responses": Ragged.from_rows([[1, 2]], torch.int32)})


def test_all_columns_but_the_large_ones_are_recorded() -> None:
    large = {"ref_hidden_states", "prompt_routes", "routes", "ref_top_ids", "ref_top_log_probs", "media", "images"}
    assert {name for name in FIELDS if not is_recorded(name)} == large
    assert is_recorded("reward_extra/acc")
    assert not is_recorded("mine")


def test_tokens_and_once_the_tokenizer_and_a_disk_that_refuses_is_told_with_the_keys_that_help(tmp_path: Path) -> None:
    saved: list[str] = []

    def save_pretrained(folder: str) -> None:
        saved.append(folder)
        write(Path(folder), "tokenizer.json")

    for step in (1, 2):
        write_tokens(DATA, tmp_path / "rollouts" / f"{step}.parquet", save_pretrained)
    assert files(tmp_path) == ["rollouts/1.parquet", "rollouts/2.parquet", "tokenizer/tokenizer.json"]
    assert len(saved) == 1
    assert read_parquet(tmp_path / "rollouts" / "2.parquet")["responses"].values.tolist() == [1, 2]
    file = tmp_path / "rollouts/1.parquet/1.parquet"
    with refuses(DiskError, file, "trainer.log_rollouts=false"):
        write_tokens(DATA, file, save_pretrained)


def test_the_oldest_steps_make_room(tmp_path: Path) -> None:
    """30 bytes a step: with 65 the newest two stay, in the order of numbers, not of names."""
    folder = tmp_path / "rollouts"
    write(folder, "notes.txt")
    for step in (2, 9, 10, 11):
        (folder / f"{step}.jsonl").write_bytes(b"0" * 10)
        (folder / f"{step}.parquet").write_bytes(b"0" * 20)
    assert recorded_steps(tmp_path) == [2, 9, 10, 11]
    assert make_room(folder, 120) == []
    assert make_room(folder, 65) == [2, 9]
    assert files(folder) == ["10.jsonl", "10.parquet", "11.jsonl", "11.parquet", "notes.txt"]
    assert make_room(folder, 1) == [10], "the newest step stays"
    write(folder, "12.tmp")
    assert recorded_steps(tmp_path) == [11]
