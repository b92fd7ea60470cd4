"""Whole runs on fake workers: what moves from step to step and goes on where it was, and short groups."""

from pathlib import Path

import pytest

from grpo_dist.runtime.event_loop import run
from grpo_dist.trainer.checkpoint.folder import read_state
from tests.trainer.fake_run import Groups, make_trainer
from tests.trainer.recorded import history, trained_rows

pytestmark = [pytest.mark.ray, pytest.mark.deep]


def test_the_kl_controller_goes_on_where_it_was(tmp_path: Path, groups: Groups) -> None:
    """The KL is 0, far below the target: three times 1 - 0.2 * 16 / 100."""
    key = "algorithm.kl_ctrl"
    overrides = ("algorithm.use_kl_in_reward=true", f"{key}.type=adaptive", f"{key}.horizon=100", f"{key}.kl_coef=0.5")
    trainer = make_trainer(tmp_path, groups, *overrides, "trainer.save_freq=3")
    trainer.fit()
    assert trainer.controllers.kl.coef == pytest.approx(0.5 * (1 - 0.2 * 16 / 100) ** 3)
    assert make_trainer(tmp_path, groups, *overrides).controllers.kl.coef == trainer.controllers.kl.coef
    other = ("algorithm.use_kl_in_reward=true", f"{key}.kl_coef=0.25", "trainer.resume_mode=force")
    fixed = make_trainer(tmp_path, groups, *other)
    assert fixed.controllers.kl.coef == 0.25, "a fixed coefficient is the config's"


def test_the_entropy_bonus_goes_on_where_it_was(tmp_path: Path, groups: Groups) -> None:
    """Entropies 0.3, 0.2, 0.1, target 0.2: c goes from 0.01 to 0.005, 0.01, 0.015; it acts after the second step."""
    key = "actor_rollout_ref.actor.entropy"
    overrides = (f"{key}_coeff=0.01", f"{key}_target=0.2", "trainer.save_freq=3")
    trainer = make_trainer(tmp_path, groups, *overrides)
    trainer.fit()
    assert [metrics["actor/entropy_coeff"] for metrics in history(trainer)[1:]] == pytest.approx([0, 0, 0.01])
    resumed = make_trainer(tmp_path, groups, *overrides)
    assert resumed.controllers.entropy == trainer.controllers.entropy
    assert resumed.controllers.entropy.weight == pytest.approx(0.015)


def test_the_baselines_of_agents_go_on_where_they_were(tmp_path: Path, groups: Groups) -> None:
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
    assert make_trainer(tmp_path, groups, *overrides).controllers.baselines == trainer.controllers.baselines


def test_the_curriculum_learns_from_every_step(groups: Groups, tmp_path: Path) -> None:
    """Batches of 4 different prompts out of 8: half of them are unseen after the first."""
    trainer = make_trainer(tmp_path, groups, "data.curriculum.enable=true", "data.train_max_samples=8")
    trainer.fit()
    rows = history(trainer)[1:]
    assert rows[0]["curriculum/unseen"] == 0.5
    pools = [f"curriculum/{pool}" for pool in ("easy", "useful", "hard", "unseen")]
    assert [sum(row[pool] for pool in pools) for row in rows] == pytest.approx([1.0] * 3)
    curriculum = read_state(tmp_path / "run" / "global_step_3").sampler["curriculum"]
    assert sum(curriculum["visits"]) == 12
    assert curriculum["range"] == [0.0, 11.0], "responses of 8 to 11 tokens score 8 to 11"


def test_groups_that_lack_an_episode_train_once_whole_and_after_a_resume_too(groups: Groups, tmp_path: Path) -> None:
    """Prompts of even numbers have 3 episodes of 4. Step 2 is sampled while step 1 trains, and is in its checkpoint."""
    ahead = ["trainer.max_staleness=1", "trainer.save_freq=1", "trainer.test_freq=3", "trainer.val_before_train=false"]
    ahead += ["trainer.max_actor_ckpt_to_keep=null", "actor_rollout_ref.rollout.agent.max_failure_rate=1"]
    groups["rollout"].call_all("test", "set_every", 2)
    try:
        trainer = make_trainer(tmp_path, groups, *ahead)
        save = trainer.save

        def save_what_is_ahead() -> None:
            if trainer.step < 3:
                run(trainer.sampler.rollout(trainer.step + 1))
            save()

        trainer.save = save_what_is_ahead  # type: ignore[method-assign]
        trainer.fit()
        seen = trainer.roles.actor.workers.call_all("test", "seen")
        trained = [trained_rows(tmp_path / "run", step) for step in (1, 2, 3)]
        from_there = f"trainer.resume_from_path={tmp_path}/run/global_step_1"
        resumed = make_trainer(tmp_path, groups, *ahead, "trainer.resume_mode=resume_path", from_there)
        restored = {uid: len(group) for uid, (group, _) in resumed.sampler.restored.items()}
        resumed.fit()
    finally:
        groups["rollout"].call_all("test", "set_every", 0)
    for step in range(3):
        uids = [row["uid"] for row in trained[step]]
        sizes = {uid: 4 - (int(uid.partition("prompt")[2]) % 2 == 0) for uid in uids}
        assert {uid: uids.count(uid) for uid in sizes} == sizes
        parts = [[uid for rank in seen for uid in rank[step][mini_batch]] for mini_batch in range(2)]
        assert sorted(parts[0] + parts[1]) == sorted(uids), "every episode once"
        assert [len(set(part)) for part in parts] == [2, 2]
        assert not set(parts[0]) & set(parts[1]), "no group is cut"
        short = list(sizes.values()).count(3)
        assert history(trainer)[step].get("agent/missing_episodes", 0) == short
        assert history(trainer)[step].get("agent/wasted_episodes", 0) == short / 16, "of 16 that were begun"
        if step == 1:
            assert sizes.items() <= restored.items(), "and whatever of step 3 was sampled by then"
    short_rows = [row for row in trained[0] if int(row["uid"].partition("prompt")[2]) % 2 == 0]
    assert [row["advantage"] for row in short_rows[:3]] == pytest.approx([-1, 0, 1], abs=1e-5), "of scores 8, 9, 10"
    assert [trained_rows(tmp_path / "run", step) for step in (2, 3)] == trained[1:]
