import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_dist.errors import BatchError, ConfigError
from grpo_dist.tracking import base
from grpo_dist.tracking.base import (
    RunInfo,
    Tracker,
    Trackers,
    as_html,
    as_markdown,
    build_trackers,
    check_metrics,
    check_trackers,
    format_samples,
)
from grpo_dist.tracking.jsonl import read_metrics
from tests.messages import refuses, says
from tests.tracking.runs import SAMPLE

RUN = {"project_name": "p", "experiment_name": "e", "config": {"hf_token": "t", "lr": 1e-6}, "resumed_step": None}


class Recorder(Tracker):
    note = "recorder"

    def __init__(self, run=None):
        self.run, self.rows, self.closed = run, [], 0
        Recorder.latest = self

    def log(self, metrics, step):
        self.rows.append((step, dict(metrics)))

    def close(self):
        self.closed += 1


class CannotStart:
    def __init__(self, run):
        raise PermissionError("read-only file system")


def test_every_tracker_and_always_jsonl_gets_every_step_and_the_config_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setitem(base.TRACKERS, "mine", f"{__name__}:Recorder")
    run_dir = tmp_path / "new" / "run"
    with build_trackers(["console", "mine", "jsonl", "mine"], RunInfo(run_dir=run_dir, **RUN)) as trackers:
        assert trackers.notes == [f"metrics: {run_dir / 'metrics.jsonl'}", "recorder"]
        trackers.log({"a": 0.5}, 1)
        trackers.log({"a": 0.25, "b": 2}, 2)
    recorder = Recorder.latest
    assert recorder.rows == [(row.pop("step"), row) for row in read_metrics(run_dir / "metrics.jsonl")]
    assert (recorder.rows, recorder.closed) == ([(1, {"a": 0.5}), (2, {"a": 0.25, "b": 2})], 1)
    assert recorder.run.config == {"hf_token": "***", "lr": 1e-6}


def test_tracker_that_fails_later_warns_once_and_is_dropped_and_the_others_go_on_and_are_closed(caplog):
    class FailsAtTwo(Recorder):
        def log(self, metrics, step):
            super().log(metrics, step)
            if step == 2:
                raise OSError("quota exceeded")

    class BadClose(Recorder):
        def close(self):
            raise OSError("gone")

    bad, good = FailsAtTwo(), Recorder()
    trackers = Trackers({"bad": bad, "unclosed": BadClose(), "good": good}, resumed_step=None)
    for step in (1, 2, 3, 4):
        trackers.log({"a": step}, step)
    trackers.close()
    trackers.close()
    assert ([step for step, _ in bad.rows], bad.closed) == ([1, 2], 1)
    assert ([step for step, _ in good.rows], good.closed) == ([1, 2, 3, 4], 1)
    failed, unclosed = (record.getMessage() for record in caplog.records)
    says(failed, "'bad'", "step 2", "OSError: quota exceeded")
    says(unclosed, "'unclosed'", "OSError: gone")


OWN = """
from grpo_dist.tracking.base import Tracker

class Mine(Tracker):
    def log(self, metrics, step): ...

class Broken(Mine):
    def __init__(self, run):
        raise LookupError("no such server")

class Mute(Tracker): ...

class Other: ...
"""


def test_what_is_no_tracker_is_refused_before_the_run_starts(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    for name, said in (
        ("Mine2", ["no 'Mine2'", "'Mine'?"]),
        ("Other", ["subclass", "grpo_dist.tracking.base.Tracker"]),
        ("Mute", ["log(metrics, step)"]),
    ):
        with refuses(ConfigError, f"trainer.logger={tmp_path}/own.py:{name}", *said):
            check_trackers([f"{tmp_path}/own.py:{name}"], "sums")


def test_tracker_that_cannot_start_stops_the_run_and_closes_the_others(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setitem(base.TRACKERS, "mine", f"{__name__}:Recorder")
    monkeypatch.setitem(base.TRACKERS, "broken", f"{__name__}:CannotStart")
    with refuses(ConfigError, "trainer.logger", "'broken'", "PermissionError: read-only", "remove 'broken'"):
        build_trackers(["mine", "broken"], RunInfo(run_dir=tmp_path, **RUN))
    assert Recorder.latest.closed == 1
    with refuses(ConfigError, "trainer.logger", "own.py:Broken", "LookupError", "line 9"):
        build_trackers([f"{tmp_path}/own.py:Broken"], RunInfo(run_dir=tmp_path, **RUN))


def test_run_dir_that_cannot_be_made_names_default_local_dir(tmp_path):
    (tmp_path / "file").write_text("")
    with refuses(ConfigError, "trainer.default_local_dir"):
        build_trackers([], RunInfo(run_dir=tmp_path / "file" / "run", **RUN))


@pytest.mark.parametrize("value", [None, "1.0", True, [1.0], np.array(1.0), 1j, np.bool_(True), torch.tensor(1.0)])
def test_what_is_no_number_is_refused_by_name_and_logged_nowhere(value):
    good = Recorder()
    with refuses(BatchError, "'actor/kl_loss'", "number", type(value).__name__):
        Trackers({"good": good}, resumed_step=None).log({"ok": 1.0, "actor/kl_loss": value}, 1)
    assert good.rows == []


def test_numbers_become_plain_and_unusable_names_are_refused():
    clean = check_metrics({"i": np.int64(3), "f": np.float32(0.5), "n": float("nan"), "p": 2})
    assert (clean["i"], [type(value) for value in clean.values()]) == (3, [int, float, float, int])
    for name in ("", "step", 3):
        with refuses(BatchError, "metric name"):
            check_metrics({name: 1.0})


def test_steps_come_in_order_and_only_other_metrics_of_the_last_one_come_later():
    """Also of the step that a run resumes from: its checkpoint may have been written before its validation ended."""
    recorder = Recorder()
    trackers = Trackers({"recorder": recorder}, resumed_step=4)
    with refuses(BatchError, "step 3", "step 4"):
        trackers.log({}, 3)
    trackers.log({"val": 1}, 4)
    trackers.log({"a": 2, "b": 2}, 5)
    trackers.log({"val": 2}, 5)
    with refuses(BatchError, "step 5", "a, val"):
        trackers.log({"a": 3, "val": 3, "c": 3}, 5)
    trackers.log({"a": 3}, 6)
    with refuses(BatchError, "step 5", "step 6"):
        trackers.log({"d": 3}, 5)
    assert recorder.rows == [(4, {"val": 1}), (5, {"a": 2, "b": 2}), (5, {"val": 2}), (6, {"a": 3})]


NOT_IMPORTED = """
import sys, pathlib
from grpo_dist.tracking import summary
from grpo_dist.tracking.base import RunInfo, build_trackers
run = dict(project_name='p', experiment_name='e', config={}, resumed_step=None)
for logger, other in ('console', 'tensorboard'), ('tensorboard', 'tensorflow'):
    build_trackers([logger], RunInfo(run_dir=pathlib.Path(sys.argv[1]), **run)).close()
    print([m for m in (other, 'wandb', 'mlflow', 'trackio', 'torch', 'ray') if m in sys.modules])
"""


@pytest.mark.deep
def test_trackers_not_asked_for_are_not_imported(tmp_path):
    command = [sys.executable, "-c", NOT_IMPORTED, str(tmp_path)]
    root = Path(base.__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True, timeout=60)
    assert done.stdout.split() == ["[]", "[]"]


# --- responses as people read them
def test_on_the_terminal_and_in_markdown():
    other = SAMPLE | {"uid": "val-8", "output": "one\ntwo", "score": 0.25}
    assert format_samples([SAMPLE, other]) == (
        "validation, step 0, val-7: score 1, gts 2\n  input:\n    1+1=?\n  output:\n    #### 2\n"
        "validation, step 0, val-8: score 0.25, gts 2\n  input:\n    1+1=?\n  output:\n    one\n    two"
    )
    assert "val-7: score none, gts 2" in format_samples([SAMPLE | {"score": None, "failure": "it raised"}])
    assert "\x1b" not in format_samples([SAMPLE | {"output": "\x1b[2J", "gts": "\x1b[0m"}])
    assert "é\t両" in format_samples([SAMPLE | {"output": "é\t両"}])
    assert as_markdown(SAMPLE) == "val-7: score 1, gts `2`\n\ninput\n\n    1+1=?\n\noutput\n\n    #### 2\n"


def test_as_a_table():
    table = as_html([SAMPLE | {"output": "<script>", "gts": [1]}, {"step": 0, "uid": "val-8", "acc": 0.5}])
    rows = [part.partition("</tr>")[0] for part in table.split("<tr>")[1:]]
    assert [re.findall("<t[dh]>(.*?)</", row) for row in rows] == [
        ["step", "uid", "input", "output", "gts", "score", "acc"],
        ["0", "val-7", "1+1=?", "&lt;script&gt;", "[1]", "1.0", ""],
        ["0", "val-8", "", "", "", "", "0.5"],
    ]
