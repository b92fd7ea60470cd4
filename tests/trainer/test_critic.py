"""The loop with a critic, on fake workers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from grpo_dist.errors import CheckpointError
from grpo_dist.trainer.trainer import GRPOTrainer
from tests.messages import refuses
from tests.processes import spawned
from tests.trainer.fake_run import Groups, make_trainer
from tests.trainer.fakes import FakeCriticWorker
from tests.trainer.metrics_page import PAGE, undocumented
from tests.trainer.recorded import history

pytestmark = [pytest.mark.ray, pytest.mark.deep]
PPO = ("recipe=ppo", "critic.ppo_mini_batch_size=1", "critic.ppo_epochs=2")


@pytest.fixture(scope="module")
def with_critic(groups: Groups) -> Iterator[Groups]:
    with spawned("critic", FakeCriticWorker, [(0, 2), (1, 2)]) as critic:
        yield groups | {"critic": critic}


@pytest.fixture(scope="module")
def warmed_up(with_critic: Groups, tmp_path_factory: pytest.TempPathFactory) -> tuple[GRPOTrainer, list, list]:
    """A run whose critic learns alone in its first step; what each rank of critic and actor has trained on."""
    trainer = make_trainer(tmp_path_factory.mktemp("ppo"), with_critic, *PPO, "trainer.critic_warmup=1")
    trainer.fit()
    return trainer, *(with_critic[role].call_all("test", "seen") for role in ("critic", "actor"))


def test_a_critic_has_mini_batches_of_its_own_and_while_it_warms_up_the_policy_stands_still(warmed_up: tuple) -> None:
    """4 prompts x 4 responses, twice over, a prompt at a time; every response once on one of two ranks."""
    trainer, seen, actor = warmed_up
    for step in range(3):
        assert [rank[step][0] for rank in seen] == [step + 1] * 2
        mini_batches = [[uid for rank in seen for uid in rank[step][1][i]] for i in range(8)]
        assert [len(uids) for uids in mini_batches] == [4] * 8
        assert all(len(set(uids)) == 1 for uids in mini_batches), "of one prompt"
        assert len({uids[0] for uids in mini_batches[:4]}) == len({uids[0] for uids in mini_batches[4:]}) == 4
    assert [len(rank) for rank in actor] == [2, 2], "of three steps"
    rows = history(trainer)[1:]
    for name in ("actor/loss", "timing_s/update_actor"):
        assert [name in row for row in rows] == [False, True, True]
    assert [row["critic/vf_loss"] for row in rows] == [4, 4, 4], "summed over ranks, averaged over mini-batches"
    assert [row["training/weight_version"] for row in rows] == [1, 2, 3]
    names = {name for row in history(trainer) for name in row} - {"step"}
    assert {"critic/vf_loss", "perf/idle/critic", "timing_s/update_critic"} <= names
    assert undocumented(names, PAGE.read_text()) == []


def test_a_response_is_compared_with_the_critics_values(warmed_up: tuple) -> None:
    """Token 5 decodes to one character, so responses of 8..11 tokens score 8..11, at their last token."""
    trainer, _, _ = warmed_up
    row = history(trainer)[1]
    assert (row["critic/values/mean"], row["critic/values/max"]) == (-1.25, -1.25)
    returns = np.concatenate([np.full(length, float(length)) for length in (8, 9, 10, 11)])
    assert row["critic/returns/mean"] == pytest.approx(returns.mean(), abs=1e-2), "less the KL"
    assert row["critic/advantages/mean"] == pytest.approx(0, abs=1e-5), "whitened"
    assert row["timing_s/values"] >= 0


def test_on_policy_nothing_is_missing_while_the_policy_stands_still(with_critic: Groups, tmp_path: Path) -> None:
    """Without a KL in the reward the update itself computes the old log-probs: not in a step without an update."""
    plain = ("algorithm.use_kl_in_reward=false", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    trainer = make_trainer(tmp_path, with_critic, *PPO, *plain, "trainer.critic_warmup=1")
    assert trainer.config.on_policy
    trainer.fit()
    assert ["training/rollout_probs_diff_mean" in row for row in history(trainer)[1:]] == [False, True, True]


def test_the_critic_is_in_the_checkpoint(with_critic: Groups, tmp_path: Path) -> None:
    first = make_trainer(tmp_path, with_critic, *PPO)
    first.fit()
    folder = tmp_path / "run/global_step_2"
    assert sorted(file.name for file in (folder / "critic").iterdir()) == ["rank0", "rank1"]
    assert "critic" in first.saver.holders(), "so a rank that is lost starts the run again from there"
    resumed = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")
    assert make_trainer(tmp_path, with_critic, *PPO, *resumed).step == 2
    (folder / "critic" / "rank1").write_text("other weights")
    dropout = "critic.model.override_config.attention_dropout"
    for more, told in (
        (resumed, ["critic/rank1"]),
        (["critic.enable=false"], ["critic.enable: true -> (not set)"]),
        ([f"+{dropout}=0.5"], [dropout, "another model"]),
    ):
        with refuses(CheckpointError, *told):
            make_trainer(tmp_path, with_critic, *PPO, *more)
