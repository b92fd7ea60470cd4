import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_dist.tracking.base import RunInfo, as_markdown
from grpo_dist.tracking.tensorboard import TensorBoardTracker
from tests.tracking.test_samples import SAMPLE


def start(run_dir, resumed_step=None):
    run = RunInfo(run_dir=run_dir, project_name="p", experiment_name="e", config={}, resumed_step=resumed_step)
    return TensorBoardTracker(run)


def scalars(run_dir, tag):
    reader = EventAccumulator(str(run_dir / "tensorboard"))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def test_tensorboard_reads_what_is_logged_before_the_run_ends(tmp_path):
    tracker = start(tmp_path)
    tracker.log({"critic/score/mean": 0.25, "n": 7}, 1)
    tracker.log({"critic/score/mean": 0.5, "bad": math.nan}, 2)
    assert scalars(tmp_path, "critic/score/mean") == [(1, 0.25), (2, 0.5)]
    assert scalars(tmp_path, "n") == [(1, 7.0)]
    assert math.isnan(scalars(tmp_path, "bad")[0][1])
    tracker.close()
    assert str(tmp_path / "tensorboard") in tracker.note


def test_samples_are_under_the_text_tab(tmp_path):
    tracker = start(tmp_path)
    tracker.log_samples([SAMPLE, SAMPLE | {"uid": "val-1"}], 3)
    tracker.close()
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert reader.PluginTagToContent("text").keys() == {"val/generations/0", "val/generations/1"}
    (event,) = reader.Tensors("val/generations/0")
    assert event.step == 3
    assert event.tensor_proto.string_val[0].decode() == as_markdown(SAMPLE)


@pytest.mark.parametrize(
    ("resumed_step", "expected"),
    [(2, [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]), (None, [(0, 2.0), (1, 2.0)]), (0, [(0, 1.0), (1, 2.0)])],
)
def test_steps_after_the_checkpoint_are_purged(tmp_path, resumed_step, expected):
    first = start(tmp_path)
    for step in range(6):
        first.log({"loss": 1.0}, step)
    first.close()
    second = start(tmp_path, resumed_step)
    for step in [step for step, value in expected if value == 2.0]:
        second.log({"loss": 2.0}, step)
    second.close()
    assert scalars(tmp_path, "loss") == expected
