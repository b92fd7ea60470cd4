"""Trackers that write into files here, read back by their own packages: trackio's database, TensorBoard's events."""

import math
from pathlib import Path
from typing import Any

import psutil
import pytest
import trackio
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_dist.errors import ConfigError
from grpo_dist.tracking.base import RunInfo, as_markdown, check_trackers
from grpo_dist.tracking.tensorboard import TensorBoardTracker
from tests.messages import refuses, says
from tests.tracking.conftest import DATABASE
from tests.tracking.runs import SAMPLE, SCORE, Start, no_network, starter
from tests.trainer.metrics_page import PAGE, documented_names


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Start:
    started: Any = starter("trackio", tmp_path / "run", request.node.name[:60])
    started.project = request.node.name[:60]
    return started


def logs(start: Any) -> list[dict[str, Any]]:
    (run,) = trackio.Api().runs(start.project)
    return trackio.SQLiteStorage.get_logs(start.project, run.name, run_id=run.id)


def test_metrics_and_config_are_in_the_database_and_nobody_else_hears_of_it(start, capfd, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 24)
    tried, names = no_network(monkeypatch), documented_names(PAGE.read_text())
    before = psutil.Process().net_connections()
    config = {"lr": 0.125, "hf_token": "do-not-keep-this"}
    with start(**config) as trackers:
        says(trackers.notes[1], DATABASE, f"trackio show --project {start.project}")
        trackers.log({SCORE: 1 / 8}, 1)
        trackers.log(dict.fromkeys(names, 0.5) | {SCORE: 2 / 8, "n": math.nan, "i": -math.inf}, 2)
        assert psutil.Process().net_connections() == before
        assert len(trackers.notes) == 2, "none was dropped"
    with start(resumed_step=2, **config) as trackers:
        trackers.log({SCORE: 3 / 8}, 3)
    rows = logs(start)
    assert [(row["step"], row[SCORE]) for row in rows] == [(1, 1 / 8), (2, 2 / 8), (3, 3 / 8)]
    assert set(names) <= rows[1].keys()
    assert math.isnan(float(rows[1]["n"]))
    assert float(rows[1]["i"]) == -math.inf
    (run,) = trackio.Api().runs(start.project)
    assert run.name.startswith("first-")
    assert (run.config["lr"], run.config["hf_token"], run.config["_Username"]) == (0.125, "***", None)
    assert (tried, capfd.readouterr().out) == ([], "")


def test_samples_are_a_table_of_their_step(start):
    with start() as trackers:
        trackers.log_samples([SAMPLE, SAMPLE | {"gts": [1, 2], "score": None, "failure": "it raised"}], 5)
        trackers.log_samples([], 6)
    (row,) = logs(start)
    table = row["val/generations"]
    assert (row["step"], table["_type"]) == (5, "trackio.table")
    found = [(each["gts"], each["score"], each["failure"]) for each in table["_value"]]
    assert found == [("2", 1.0, None), ("[1, 2]", None, "it raised")]


def test_a_name_that_trackio_keeps_for_itself_is_refused_before_the_run() -> None:
    with refuses(ConfigError, "trainer.logger", "'trackio'", "trainer.project_name=sums_system", "suffix"):
        check_trackers(["trackio"], "sums_system")


# --- TensorBoard
def tensorboard(run_dir, resumed_step=None):
    run = RunInfo(run_dir=run_dir, project_name="p", experiment_name="e", config={}, resumed_step=resumed_step)
    return TensorBoardTracker(run)


def events(run_dir):
    reader = EventAccumulator(str(run_dir / "tensorboard"))
    reader.Reload()
    return reader


def scalars(run_dir, tag):
    return [(event.step, event.value) for event in events(run_dir).Scalars(tag)]


def test_tensorboard_reads_what_is_logged_before_the_run_ends(tmp_path):
    tracker = tensorboard(tmp_path)
    tracker.log({"critic/score/mean": 0.25, "n": 7}, 1)
    tracker.log({"critic/score/mean": 0.5, "bad": math.nan}, 2)
    assert scalars(tmp_path, "critic/score/mean") == [(1, 0.25), (2, 0.5)]
    assert scalars(tmp_path, "n") == [(1, 7.0)]
    assert math.isnan(scalars(tmp_path, "bad")[0][1])
    tracker.close()
    assert str(tmp_path / "tensorboard") in tracker.note


def test_samples_are_under_the_text_tab(tmp_path):
    tracker = tensorboard(tmp_path)
    tracker.log_samples([SAMPLE, SAMPLE | {"uid": "val-1"}], 3)
    tracker.close()
    reader = events(tmp_path)
    assert reader.PluginTagToContent("text").keys() == {"val/generations/0", "val/generations/1"}
    (event,) = reader.Tensors("val/generations/0")
    assert (event.step, event.tensor_proto.string_val[0].decode()) == (3, as_markdown(SAMPLE))


@pytest.mark.parametrize(
    ("resumed_step", "expected"),
    [(2, [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]), (None, [(0, 2.0), (1, 2.0)]), (0, [(0, 1.0), (1, 2.0)])],
)
def test_steps_after_the_checkpoint_are_purged(tmp_path, resumed_step, expected):
    again = [step for step, value in expected if value == 2.0]
    for loss, steps, resumed in ((1.0, range(6), None), (2.0, again, resumed_step)):
        tracker = tensorboard(tmp_path, resumed)
        for step in steps:
            tracker.log({"loss": loss}, step)
        tracker.close()
    assert scalars(tmp_path, "loss") == expected
