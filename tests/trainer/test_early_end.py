"""A run that ends early, on fake workers; one that trains one model: supervised/test_trainer.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.trainer.checkpoint.folder import read_state
from tests.messages import refuses, says
from tests.trainer.fake_run import make_trainer
from tests.trainer.recorded import history

pytestmark = [pytest.mark.ray, pytest.mark.deep]


def test_a_value_that_is_reached_ends_the_run_with_all_that_its_end_has(groups: dict, tmp_path: Path) -> None:
    """The score of each validation is 8. Of 3 steps one is trained, and with another value the others are."""
    metric, few = "val-core/arithmetic/reward/mean@1", ["trainer.test_freq=1", "trainer.save_freq=100"]
    few.append("trainer.val_before_train=false")
    shown: list[str] = []
    trainer = make_trainer(tmp_path, groups, f"trainer.stop_at={{metric: {metric}, value: 8}}", *few)
    trainer.progress.message = shown.append  # type: ignore[method-assign]
    trainer.fit()
    assert [row["step"] for row in history(trainer)] == [1]
    says(shown, "step 1", metric, "trainer.stop_at.value=8")
    assert read_state(tmp_path / "run/global_step_1").metrics[metric] == 8
    again = make_trainer(tmp_path, groups, f"trainer.stop_at={{metric: {metric}, value: 8}}", *few)
    again.fit()
    assert history(again) == []
    other = make_trainer(tmp_path, groups, f"trainer.stop_at={{metric: {metric}, value: 9}}", *few)
    other.fit()
    assert [row["step"] for row in history(other)] == [2, 3]
    unknown = make_trainer(tmp_path / "unknown", groups, "trainer.stop_at={metric: val-core/x, value: 1}", *few)
    with refuses(ConfigError, "trainer.stop_at.metric=val-core/x", metric):
        unknown.fit()
    assert unknown.step == 1, "its first validation"
