"""The loop on groups that lack an episode, on fake workers: real Ray, real handles, no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_dist.runtime.event_loop import run
from tests.trainer.fake_run import make_trainer
from tests.trainer.recorded import history

pytestmark = [pytest.mark.ray, pytest.mark.deep]


def trained_rows(run_dir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run_dir / f"rollouts/{step}.jsonl").read_text().splitlines()]


def test_groups_that_lack_an_episode_train_once_whole_and_after_a_resume_too(
    groups: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of even numbers have 3 episodes of 4. Step 2 is sampled while step 1 trains, and is in its checkpoint.

    Of a short group the scores 8, 9, 10 have the advantages -1, 0, 1.
    """
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

        monkeypatch.setattr(trainer, "save", save_what_is_ahead)
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
    assert [row["advantage"] for row in short_rows[:3]] == pytest.approx([-1, 0, 1], abs=1e-5)
    assert [trained_rows(tmp_path / "run", step) for step in (2, 3)] == trained[1:]
