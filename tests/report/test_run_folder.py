"""What the report reads of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.report.page import config_table, overview
from grpo_dist.runs import read_run
from tests.messages import refuses, says
from tests.report.runs import write_run, write_step


def test_a_run(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "val-core/sums/acc/mean@1": 0.25},
        {"step": 1, "critic/score/mean": 0.5, "val-core/sums/acc/mean@1": 0.5, "val-core/sums/reward/mean@1": 0.5},
    ]
    folder = write_run(tmp_path / "run", rows, "trainer.project_name=sums", "trainer.experiment_name=first")
    write_step(folder, 1, ["1", "2"], [1.0, 0.0], tokens=False)
    run = read_run(folder)
    assert (run.name, len(run.rows), run.rollout_steps, run.validation) == (
        "sums/first", 2, [1], ["val-core/sums/acc/mean@1"],
    )  # fmt: skip
    assert run.alarms == []


def test_alarms_are_those_of_the_run(tmp_path: Path) -> None:
    """KL above 1 for three steps in a row, by the run's own threshold above 2."""
    rows = [{"step": step, "actor/kl_loss": kl} for step, kl in enumerate((0.1, 1.5, 1.5, 0.1, 1.5, 1.6, 1.7, 1.8), 1)]
    (alarm,) = read_run(write_run(tmp_path / "run", rows)).alarms
    assert (alarm.step, alarm.rule) == (7, "kl")
    says(alarm.text, "actor/kl_loss", "1.7", "actor.kl_loss_coef")
    assert read_run(write_run(tmp_path / "other", rows, "trainer.health.kl.threshold=2")).alarms == []


def test_secrets_are_not_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [{"step": 1, "critic/score/mean": 1.0}])
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("reward_kwargs: {}", "reward_kwargs: {api_key: hush}"))
    assert "hush" in (folder / "config.yaml").read_text()
    assert "hush" not in str(read_run(folder).config)


def test_keys_that_differ(tmp_path: Path) -> None:
    rows = [{"step": 1, "critic/score/mean": 1.0}]
    runs = [read_run(write_run(tmp_path / str(n), rows, f"actor_rollout_ref.rollout.n={n}")) for n in (4, 8)]
    assert dict(config_table(runs))["actor_rollout_ref.rollout.n"] == ["4", "8"]
    assert "algorithm.adv_estimator" not in dict(config_table(runs))
    (values,) = dict(config_table(runs[:1]))["algorithm.adv_estimator"]
    assert values == "grpo", "a single run shows all of its keys"


def test_folders_of_no_run_are_refused(tmp_path: Path) -> None:
    with refuses(ConfigError, tmp_path, "metrics.jsonl", "trainer.default_local_dir"):
        read_run(tmp_path)


@pytest.mark.parametrize(("last", "ended"), [(0.95, True), (0.85, False)])
def test_why_a_run_ended_early_is_said(tmp_path: Path, last: float, ended: bool) -> None:
    rows = [{"step": step, "val-core/x": value} for step, value in ((0, 0.5), (5, last))]
    run = read_run(write_run(tmp_path, rows, "trainer.stop_at={metric: val-core/x, value: 0.9}"))
    told = [text for name, text in overview([run])["facts"] if name == "ended"]
    assert bool(told) is ended
    if ended:
        says(told, "val-core/x", "0.95", "trainer.stop_at.value=0.9")


def test_which_role_waited_is_said_of_a_run_with_idle_shares(tmp_path: Path) -> None:
    rows = [{"step": n, "timing_s/step": 1.0, "perf/idle/actor": 0.5, "perf/idle/rollout": 0.25} for n in (1, 2, 3)]
    run = read_run(write_run(tmp_path / "run", rows))
    says(run.waited, "step 3", "ranks 50%", "engines 25%")
    assert overview([run])["waited"] == run.waited
    assert read_run(write_run(tmp_path / "short", rows[:2])).waited == ""
