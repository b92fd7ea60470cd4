import pytest
import torch

from grpo_dist.algorithms import compute_advantage
from grpo_dist.algorithms.advantage import STD_EPS
from grpo_dist.errors import BatchError, ConfigError
from tests.golden import cases, tensors


def outcome(rewards: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards on the last of 3 tokens; the mask covers 1, 2, 3, 3, ... tokens."""
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 0]] + [[1.0, 1, 1]] * (len(rewards) - 2))[: len(rewards)]
    rows = torch.zeros_like(mask)
    rows[torch.arange(len(rewards)), mask.sum(-1).long() - 1] = torch.tensor(rewards)
    return rows, mask


@pytest.mark.parametrize("case", cases("advantage", ("grpo", "rloo")))
def test_equals_verl(case: dict) -> None:
    advantages, returns = compute_advantage(case["name"], **tensors(case["inputs"]), config=case["config"])
    torch.testing.assert_close(advantages, torch.tensor(case["outputs"]["advantages"]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, torch.tensor(case["outputs"]["returns"]), rtol=1e-5, atol=1e-5)


def test_grpo_by_hand() -> None:
    """Rewards 1, 0, 0, 0: mean 1/4, sample variance (9 + 1 + 1 + 1) / 16 / 3 = 1/4, std 1/2."""
    rewards, mask = outcome([1.0, 0.0, 0.0, 0.0])
    advantages, _ = compute_advantage("grpo", token_level_rewards=rewards, response_mask=mask, index=["a"] * 4)
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25]) / (0.5 + STD_EPS)
    torch.testing.assert_close(advantages, expected.unsqueeze(-1) * mask)


def test_dr_grpo_leaves_the_std_out() -> None:
    rewards, mask = outcome([1.0, 0.0, 0.0, 0.0])
    advantages, _ = compute_advantage(
        "grpo",
        token_level_rewards=rewards,
        response_mask=mask,
        index=[7] * 4,
        config={"norm_adv_by_std_in_grpo": False},
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.75], [-0.25], [-0.25], [-0.25]]) * mask)


def test_rloo_by_hand() -> None:
    """Rewards 3, 0, 0: the others' means are 0, 1.5, 1.5."""
    rewards, mask = outcome([3.0, 0.0, 0.0])
    advantages, _ = compute_advantage("rloo", token_level_rewards=rewards, response_mask=mask, index=["a"] * 3)
    torch.testing.assert_close(advantages, torch.tensor([[3.0], [-1.5], [-1.5]]) * mask)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_equal_rewards_and_single_responses_teach_nothing(name: str) -> None:
    rewards, mask = outcome([0.5, 0.5, 0.5, 2.0])
    advantages, _ = compute_advantage(name, token_level_rewards=rewards, response_mask=mask, index=["a"] * 3 + ["b"])
    torch.testing.assert_close(advantages, torch.zeros_like(mask))


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_groups_may_be_interleaved(name: str) -> None:
    rewards, mask = outcome([1.0, 0.0, 0.0, 5.0])
    mixed, _ = compute_advantage(name, token_level_rewards=rewards, response_mask=mask, index=["a", "b", "a", "b"])
    order = torch.tensor([0, 2, 1, 3])
    sorted_, _ = compute_advantage(
        name, token_level_rewards=rewards[order], response_mask=mask[order], index=["a", "a", "b", "b"]
    )
    torch.testing.assert_close(mixed[order], sorted_)


def test_mistakes_are_named() -> None:
    rewards, mask = outcome([1.0, 0.0])
    with pytest.raises(BatchError, match="needs `index`"):
        compute_advantage("grpo", token_level_rewards=rewards, response_mask=mask)
    with pytest.raises(BatchError, match="1 entries for 2"):
        compute_advantage("grpo", token_level_rewards=rewards, response_mask=mask, index=["a"])
    with pytest.raises(BatchError, match="differ"):
        compute_advantage("grpo", token_level_rewards=rewards[:, :2], response_mask=mask, index=["a", "a"])
    with pytest.raises(ConfigError, match=r"algorithm\.adv_estimator=grp: .*did you mean 'grpo'"):
        compute_advantage("grp", token_level_rewards=rewards, response_mask=mask, index=["a", "a"])
