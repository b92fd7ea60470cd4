"""Coefficients that move from step to step, and go on where they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.runtime.group import WorkerGroup
from tests.trainer.fake_run import make_trainer
from tests.trainer.recorded import history


@pytest.mark.deep
def test_the_kl_controller_goes_on_where_it_was(tmp_path: Path, groups: dict[str, WorkerGroup]) -> None:
    """The KL is 0, far below the target: three times 1 - 0.2 * 16 / 100."""
    key = "algorithm.kl_ctrl"
    overrides = ("algorithm.use_kl_in_reward=true", f"{key}.type=adaptive", f"{key}.horizon=100", f"{key}.kl_coef=0.5")
    trainer = make_trainer(tmp_path, groups, *overrides, "trainer.save_freq=3")
    trainer.fit()
    assert trainer.controllers.kl.coef == pytest.approx(0.5 * (1 - 0.2 * 16 / 100) ** 3)
    resumed = make_trainer(tmp_path, groups, *overrides)
    assert resumed.controllers.kl.coef == trainer.controllers.kl.coef
    other = ("algorithm.use_kl_in_reward=true", f"{key}.kl_coef=0.25", "trainer.resume_mode=force")
    fixed = make_trainer(tmp_path, groups, *other)
    assert fixed.controllers.kl.coef == 0.25, "a fixed coefficient is the config's"


def test_the_entropy_bonus_goes_on_where_it_was(tmp_path: Path, groups: dict[str, WorkerGroup]) -> None:
    """Entropies 0.3, 0.2, 0.1, target 0.2: c goes from 0.01 to 0.005, 0.01, 0.015; it acts after the second step."""
    key = "actor_rollout_ref.actor.entropy"
    overrides = (f"{key}_coeff=0.01", f"{key}_target=0.2", "trainer.save_freq=3")
    trainer = make_trainer(tmp_path, groups, *overrides)
    trainer.fit()
    assert [metrics["actor/entropy_coeff"] for metrics in history(trainer)[1:]] == pytest.approx([0, 0, 0.01])
    resumed = make_trainer(tmp_path, groups, *overrides)
    assert resumed.controllers.entropy == trainer.controllers.entropy
    assert resumed.controllers.entropy.weight == pytest.approx(0.015)


def test_the_baselines_of_agents_go_on_where_they_were(tmp_path: Path, groups: dict[str, WorkerGroup]) -> None:
    """One agent, 16 responses a step: b goes from 0 to 0.9^16 b + (1 - 0.9^16) the mean score, step by step."""
    overrides = ("algorithm.adv_estimator=rae", "algorithm.rae_decay=0.9", "trainer.save_freq=3")
    trainer = make_trainer(tmp_path, groups, *overrides)
    trainer.fit()
    baseline, kept = 0.0, 0.9**16
    (number,) = trainer.controllers.baselines.values
    for step, metrics in enumerate(history(trainer)[1:]):
        assert metrics.get(f"rae/baseline/{number}", 0.0) == pytest.approx(baseline), step
        assert metrics[f"rae/sequences/{number}"] == 16
        baseline = kept * baseline + (1 - kept) * metrics[f"rae/score/{number}"]
    assert trainer.controllers.baselines.values == {number: pytest.approx(baseline)}
    assert number % 2**32 == 0 < number, "of the data source, and of no agent"
    resumed = make_trainer(tmp_path, groups, *overrides)
    assert resumed.controllers.baselines == trainer.controllers.baselines
