"""trackio's local database, read back by trackio's own storage."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

FOLDER = tempfile.mkdtemp()
os.environ["TRACKIO_DIR"] = FOLDER  # read when trackio is imported

import trackio  # noqa: E402

from grpo_dist.errors import ConfigError  # noqa: E402
from grpo_dist.tracking.base import RunInfo, Trackers, build_trackers, check_trackers  # noqa: E402
from tests.messages import refuses, says  # noqa: E402
from tests.no_network import no_network  # noqa: E402
from tests.tracking.test_samples import SAMPLE  # noqa: E402
from tests.trainer.metrics_page import PAGE, documented_names  # noqa: E402

SCORE = "critic/score/mean"
STORE = trackio.SQLiteStorage


@pytest.fixture(scope="module", autouse=True)
def removed() -> Any:
    yield
    shutil.rmtree(FOLDER)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., Trackers]:
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)

    def started(resumed_step: int | None = None, **config: Any) -> Trackers:
        names = {"project_name": request.node.name[:60], "experiment_name": "first"}
        return build_trackers(
            ["trackio"], RunInfo(run_dir=tmp_path / "run", config=config, resumed_step=resumed_step, **names)
        )

    started.project = request.node.name[:60]  # type: ignore[attr-defined]
    return started


def logs(start: Any) -> list[dict[str, Any]]:
    """The rows of the project's one run."""
    (run,) = trackio.Api().runs(start.project)
    return STORE.get_logs(start.project, run.name, run_id=run.id)


def test_metrics_and_config_are_in_the_database_and_nobody_else_hears_of_it(start, capfd, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 24)
    tried = no_network(monkeypatch)
    before = psutil.Process().net_connections()
    with start(lr=0.125, hf_token="do-not-keep-this") as trackers:
        says(trackers.notes[1], FOLDER, f"trackio show --project {start.project}")
        trackers.log({SCORE: 1 / 8}, 1)
        trackers.log({SCORE: 2 / 8, "n": math.nan, "i": -math.inf}, 2)
        assert psutil.Process().net_connections() == before
        assert len(trackers.notes) == 2, "none was dropped"
    rows = logs(start)
    assert [(row["step"], row[SCORE]) for row in rows] == [(1, 1 / 8), (2, 2 / 8)]
    assert math.isnan(float(rows[1]["n"]))
    assert float(rows[1]["i"]) == -math.inf
    (run,) = trackio.Api().runs(start.project)
    assert run.name.startswith("first-")
    assert run.config is not None
    assert (run.config["lr"], run.config["hf_token"], run.config["_Username"]) == (0.125, "***", None)
    assert (tried, capfd.readouterr().out) == ([], "")


def test_the_names_of_all_metrics_are_kept(start):
    names = documented_names(PAGE.read_text())
    with start() as trackers:
        trackers.log(dict.fromkeys(names, 0.5), 1)
    assert set(names) <= logs(start)[0].keys()


def test_samples_are_a_table_of_their_step(start):
    with start() as trackers:
        trackers.log_samples([SAMPLE, SAMPLE | {"gts": [1, 2], "score": None, "failure": "it raised"}], 5)
        trackers.log_samples([], 6)
    (row,) = logs(start)
    table = row["val/generations"]
    assert (row["step"], table["_type"]) == (5, "trackio.table")
    assert [(each["gts"], each["score"], each["failure"]) for each in table["_value"]] == [
        ("2", 1.0, None),
        ("[1, 2]", None, "it raised"),
    ]


def test_a_name_that_trackio_keeps_for_itself_is_refused_before_the_run() -> None:
    with refuses(ConfigError, "trainer.logger", "'trackio'", "trainer.project_name=sums_system", "suffix"):
        check_trackers(["trackio"], "sums_system")


def test_a_resumed_run_goes_on_in_the_same_and_a_fresh_one_is_new(start, tmp_path):
    with start() as trackers:
        trackers.log({SCORE: 1 / 8}, 1)
    name = (tmp_path / "run/trackio/run_id").read_text()
    with start(resumed_step=1) as trackers:
        trackers.log({SCORE: 2 / 8}, 2)
    assert [(row["step"], row[SCORE]) for row in logs(start)] == [(1, 1 / 8), (2, 2 / 8)]
    assert (tmp_path / "run/trackio/run_id").read_text() == name
    with start() as trackers:
        trackers.log({SCORE: 1 / 8}, 1)
    assert len(trackio.Api().runs(start.project)) == 2
