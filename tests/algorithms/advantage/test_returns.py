"""Baselines of tokens and of turns, by hand; tests/algorithms/test_advantage.py has the other estimators."""

from __future__ import annotations

from typing import Any

import torch

from grpo_dist.algorithms import compute_advantage
from grpo_dist.algorithms.targets import turn_states


def test_the_optimal_token_baseline_by_hand() -> None:
    """W_1 is 1/2, 1/4 and 0, so B_1 = 1/2 / (3/4); W_2 is 1, 1 and 0; the last token is its response's alone."""
    rewards = torch.tensor([[0.0, 1, 0], [0, 0, 0], [0, 0, 0]])
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 0], [1, 1, 1]])
    norms = torch.tensor([[0.5, 0.5, 9], [0.25, 0.75, 9], [0, 0, 0]])
    arguments: dict[str, Any] = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": ["a"] * 3,
        "gradient_norms": norms,
    }
    advantages, returns = compute_advantage("optimal_token_baseline", **arguments)
    expected = torch.tensor([[1 / 3, 0.5, 0], [-2 / 3, -0.5, 0], [-2 / 3, -0.5, 0]])
    torch.testing.assert_close(advantages, expected)
    assert returns.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0]]


def test_gigpo_by_hand() -> None:
    """Scores 1 and 0, less 1/2. With gamma 1/2 the turns of the first return 1/2 and 1, those of the second 0."""
    tokens = torch.tensor([[5, 6, 9, 7, 0, 0], [5, 9, 8, 3, 4, 0]])
    mask = torch.tensor([[1.0, 1, 0, 1, 0, 0], [1, 0, 1, 0, 1, 0]])
    states = turn_states(tokens, mask)
    assert states.tolist() == [[1, 1, 0, 2, 0, 0], [1, 0, 2, 0, 3, 0]], "at the beginning, after 9, after 3"
    rewards = torch.tensor([[0, 0, 0, 0.75, 0.25, 0], [0.0] * 6])  # a part lies behind the turn that it is for
    arguments: dict[str, Any] = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": ["a"] * 2,
        "turn_states": states,
    }
    config = {"norm_adv_by_std_in_grpo": False, "gamma": 0.5}
    advantages, _ = compute_advantage("gigpo", **arguments, config=config)
    assert advantages.tolist() == [[0.75, 0.75, 0, 1, 0, 0], [-0.75, 0, -1, 0, -0.5, 0]]
    elsewhere, _ = compute_advantage("gigpo", **arguments | {"index": ["a", "b"]}, config=config)
    assert not elsewhere.any(), "other prompts are other states"
    none = {"turn_states": states * 0, "response_mask": mask * 0}
    assert not compute_advantage("gigpo", **arguments | none, config=config)[0].any()


def test_gigpo_tells_two_tries_at_a_turn_apart() -> None:
    """Rewards 1 and 0 of two tries: they return 1 and 0, less 1/2; both episodes have the same score."""
    sampled, follows = torch.ones(2, 4), torch.tensor([[-1, 0, -1, 2]] * 2)
    arguments: dict[str, Any] = {
        "token_level_rewards": torch.tensor([[0.0, 1, 0, 0]] * 2),
        "response_mask": sampled,
        "index": ["a"] * 2,
        "turn_states": turn_states(torch.tensor([[5, 6, 7, 8], [4, 3, 2, 1]]), sampled, follows),
        "config": {"norm_adv_by_std_in_grpo": False},
    }
    for agents in (None, torch.full((2, 4), 1)):
        advantages, _ = compute_advantage("gigpo", **arguments, agent_ids=agents)
        assert advantages.tolist() == [[0.5, 0.5, -0.5, -0.5]] * 2
