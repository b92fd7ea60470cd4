"""`trainer.stream_mini_batches`: what takes the whole batch is refused beside it."""

from __future__ import annotations

import pytest

from grpo_dist.plan.commands import load_config
from tests.config.refusals import refused
from tests.messages import says
from tests.plan.test_rules import ACTOR, ROLLOUT, notes

KEY = "trainer.stream_mini_batches=true"
STREAM = (KEY, f"{ACTOR}.ppo_mini_batch_size=8")
CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["algorithm.adv_estimator=reinforce_plus_plus_baseline"], ["grpo", "rloo"]),
        (["algorithm.adv_estimator=gae"], ["grpo"]),
        (["algorithm.adv_estimator=gpg"], ["grpo"]),
        (["algorithm.adv_estimator=my_module:estimator"], ["grpo"]),
        (["algorithm.filter_groups.enable=true"], ["false"]),
        ([f"{CORRECTION}.rollout_is_batch_normalize=true"], ["false"]),
        ([f"{CORRECTION}.m2_threshold=0.04"], ["null"]),
        ([f"{ROLLOUT}.over_sample_rate=0.5"], ["0"]),
        ([f"{ACTOR}.ppo_epochs=2"], ["1"]),
        ([f"{ACTOR}.shuffle=true"], ["false"]),
        ([f"{ACTOR}.top_entropy_quantile=0.2"], ["1"]),
        ([f"{ACTOR}.policy_loss.loss_mode=clip_cov"], ["vanilla"]),
        (["data.train_batch_size=8"], [f"{ACTOR}.ppo_mini_batch_size=8", "false"]),
        (["cluster=single_gpu", f"{ROLLOUT}.free_cache_engine=true"], ["false"]),
    ],
)
def test_what_takes_the_whole_batch(overrides: list[str], parts: list[str]) -> None:
    says(refused(*STREAM, *overrides), KEY, overrides[-1], *parts)


def test_each_mini_batch_is_on_policy_and_what_has_aged_in_the_step_is_weighed() -> None:
    config, _ = load_config([*STREAM])
    batch = config.data.train_batch_size
    assert (config.parts_per_step, config.on_policy, config.rollout_is) == (batch // 8, True, "token")
    assert not load_config([f"{ACTOR}.ppo_mini_batch_size=8"])[0].on_policy
    assert notes(*STREAM) == []
    (note,) = notes(*STREAM, f"{CORRECTION}.rollout_is=null")
    says(note, KEY, f"{CORRECTION}.rollout_is=null", "auto")
    for also in ("trainer.max_staleness=1", "algorithm.use_kl_in_reward=true", f"{CORRECTION}.bypass_mode=true"):
        load_config([*STREAM, also])
