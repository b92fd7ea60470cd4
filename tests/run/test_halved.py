"""Half of a setting, where half of it is legal."""

import pytest

from grpo_dist.plan.commands import load_config
from grpo_dist.run.training import halved

ACTOR = "actor_rollout_ref.actor"
BUDGETS = (f"{ACTOR}.use_dynamic_bsz=true", "data.max_prompt_length=60", "data.max_response_length=40",
           f"{ACTOR}.ppo_max_token_len_per_gpu=250")  # fmt: skip


def test_a_micro_batch_down_to_one_sequence() -> None:
    config, _ = load_config([f"{ACTOR}.ppo_micro_batch_size_per_gpu=3"])
    key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    smaller = halved(config, (key, 3))
    assert smaller is not None
    assert smaller.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 1
    assert smaller.actor_rollout_ref.rollout == config.actor_rollout_ref.rollout
    assert halved(smaller, (key, 1)) is None
    assert halved(config, None) is None


@pytest.mark.parametrize("role", ["rollout", "ref"])
def test_a_budget_that_is_inherited_and_down_to_the_longest_sequence(role: str) -> None:
    config, _ = load_config([*BUDGETS])
    key = f"actor_rollout_ref.{role}.log_prob_max_token_len_per_gpu"
    smaller = halved(config, (key, 250))
    assert smaller is not None
    assert getattr(smaller.actor_rollout_ref, role).log_prob_max_token_len_per_gpu == 125
    assert smaller.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 250
    assert halved(smaller, (key, 125)) is None, "the longest sequence has 100 tokens"
