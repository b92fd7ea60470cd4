"""The contract of `grpo_dist.tracking.base.Tracker`, of all trackers: those of the table, and one of a file."""

import functools
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_dist.plugins.names import LOGGERS
from grpo_dist.tracking.base import TRACKERS, check_trackers, tracker_ids
from tests.tracking.conftest import DATABASE
from tests.tracking.runs import SAMPLE, Start, starter
from tests.trainer.metrics_page import PAGE, documented_names

OWN = """
from grpo_dist.tracking.base import Tracker

class Lines(Tracker):
    def __init__(self, run):
        number = 0 if run.resumed_step is not None else len(list(run.folder("lines").iterdir()))
        run.store_id("lines", run.known_id("lines") or f"run {number}")
        self.note, self.file = "lines", (run.folder("lines") / "metrics").open("a")

    def log(self, metrics, step):
        self.file.write(f"{step} {metrics}\\n")

    def close(self):
        self.file.close()
"""
# Trackers whose service has runs, by the name under which they keep the id of theirs.
WITH_RUNS = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "own": "lines"}
NAMES = [*TRACKERS, "own"]


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.ray) if name == "prometheus" else name for name in NAMES])
def name(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "prometheus":
        request.getfixturevalue("local_ray")
    (tmp_path / "own.py").write_text(OWN)
    yield f"{tmp_path}/own.py:Lines" if request.param == "own" else request.param
    if request.param == "wandb":
        import wandb

        wandb.teardown()


@pytest.fixture
def start(name: str, tmp_path: Path) -> Start:
    begin = starter(name, tmp_path / "run", f"contract-{os.getpid()}")
    return functools.partial(begin, lr=0.125, hf_token="do-not-keep-this")


def test_the_names_of_the_config_are_those_of_the_table() -> None:
    assert set(LOGGERS) == {"console", *TRACKERS}


def test_it_takes_all_that_a_run_logs_and_finishes(
    name: str, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    names = documented_names(PAGE.read_text())
    check_trackers([name], "sums")
    assert not (tmp_path / "run").exists(), "the checks start nothing"
    with start() as trackers:
        assert all(trackers.notes)
        trackers.log_samples([SAMPLE, SAMPLE | {"gts": [1, 2], "score": None}], 0)
        trackers.log(dict.fromkeys(names, 0.5), 0)
        trackers.log({"actor/lr": math.nan, "actor/loss": -math.inf, "reward_extra/zähler": 3}, 1)
        trackers.log_samples([], 2)
        trackers.log({}, 2)
        trackers.log_samples([SAMPLE], 2)
        trackers.log({"val-core/gsm8k/reward/mean@1": 0.5}, 2)  # of a validation that ended later
        trackers.log({"critic/score/mean": 0.5}, 3)
        assert len(trackers._active) == (1 if name == "jsonl" else 2), "none was dropped"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert capfd.readouterr().out == ""
    places = [*tmp_path.rglob("*"), *Path(DATABASE).rglob("*")]
    written = [path.read_bytes() for path in places if path.is_file()]
    assert not any(b"do-not-keep-this" in content for content in written), "no secret of the config is kept"


@pytest.mark.deep
def test_a_resumed_run_is_continued_and_a_fresh_one_is_another(name: str, start: Start, tmp_path: Path) -> None:
    ids = []
    for resumed_step, step in ((None, 1), (1, 2), (None, 1)):
        with start(resumed_step) as trackers:
            trackers.log({"critic/score/mean": 0.5}, step)
            assert len(trackers._active) == (1 if name == "jsonl" else 2), "none was dropped"
        ids.append(tracker_ids(tmp_path / "run"))
    kept = WITH_RUNS.get("own" if ":" in name else name)
    assert [list(each) for each in ids] == [[] if kept is None else [kept]] * 3
    assert ids[0] == ids[1]
    assert kept is None or ids[2] != ids[1]
