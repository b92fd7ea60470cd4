"""What is found by validating: the best checkpoint, and the value that ends a run."""

from grpo_dist.plan.commands import load_config
from tests.config.refusals import refused
from tests.messages import says


def notes(*overrides):
    return load_config(list(overrides))[1]


def test_what_ends_a_run_is_found_by_validating():
    ends, metric = "trainer.stop_at={metric: val-core/x, value: 0.9}", "trainer.stop_at.metric=val-core/x"
    says(refused(ends, "trainer.test_freq=-1"), metric, "trainer.test_freq=-1", "data.val_files and trainer.test_freq")
    says(refused(ends, "data.val_files=null"), metric, "data.val_files and trainer.test_freq")
    assert notes(ends) == []
    says(refused("trainer.stop_at={metric: val-core/x}"), "trainer.stop_at={metric:val-core/x}", "{value: ...}")
    says(refused("trainer.stop_at={metric: val-core/x, value: high}"), "trainer.stop_at=high", "a number")


def test_the_best_checkpoint_is_found_by_validating():
    best = "trainer.keep_best_metric=val-core/x"
    text = refused(best, "trainer.test_freq=-1")
    says(text, best, "trainer.test_freq=-1")
    says(refused(best, "data.val_files=null"), best, "data.val_files and trainer.test_freq")
    assert notes(best, "trainer.test_freq=5", "trainer.save_freq=10") == []
    assert notes(best, "trainer.save_freq=-1", "trainer.save_interval_minutes=5") == []
    (note,) = notes(best, "trainer.test_freq=5", "trainer.save_freq=7")
    says(note, "save_freq=7", "test_freq=5")
