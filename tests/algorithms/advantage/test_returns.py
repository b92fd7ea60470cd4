"""Baselines of tokens and of turns, by hand; tests/algorithms/test_advantage.py has the other estimators."""

from __future__ import annotations

from typing import Any

import torch

from grpo_dist.algorithms import compute_advantage
from grpo_dist.algorithms.turns import answers, turn_states

# A row with branches, and two tokens of padding: a turn of two tokens, "9", a turn that is sampled twice, a prompt of a
# sub-agent and its turn, "8" as another answer to the first turn, a turn that is cut in two by another try at its end,
# and what follows a history in which the first turn is written in another way.
TOKENS = torch.tensor([[5, 6, 9, 7, 4, 1, 9, 2, 8, 3, 3, 6, 9, 7, 0, 0]])
SAMPLED = torch.tensor([[1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 0, 0]])
FOLLOWS = torch.tensor([[-1, 0, 1, 2, 2, -3, 5, 6, 1, 8, 9, 9, 0, 12, -1, -1]])


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


def test_turns_and_their_states_in_branches() -> None:
    """A turn is not joined with another try at it, and its state is what was put in on its own path."""
    states = turn_states(TOKENS, SAMPLED, FOLLOWS)
    #        begin  9: twice    1 9   8: cut behind 3, and another end       9, behind a part of a turn
    wanted = [1, 1, 0, 2, -2, 0, 0, 3, 0, 4, -5, -5, 0, 2, 0, 0]
    assert states.tolist() == [wanted], "9 behind a turn is one state, 1 9 from the very beginning another"
    into_the_prompt = FOLLOWS.where(FOLLOWS != -3, -2)
    assert turn_states(TOKENS, SAMPLED, into_the_prompt)[0, 7] not in (0, 2), "no answer to a turn"


def test_what_answers_a_turn_is_no_prompt() -> None:
    assert answers(SAMPLED, FOLLOWS).nonzero()[:, 1].tolist() == [2, 8]
    longer = torch.tensor([[-1, 0, 1, 2, 2, 3, 5, 6, 1, 8, 9, 9, 2, 12, -1, -1]])
    assert answers(SAMPLED, longer).nonzero()[:, 1].tolist() == [2, 5, 6, 8, 12], "behind a turn; on from an answer"
    sampled = torch.tensor([[0, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0]])
    assert answers(sampled).tolist() == [[0, 0, 1, 1, 0, 1], [0, 1, 0, 1, 1, 1]], "nor what begins a row"


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
