"""Whose tokens are whose, and what turns have earned."""

from __future__ import annotations

import math

import pytest

from grpo_dist.agents.episode import Turns
from tests.messages import refuses


def turns() -> Turns:
    """Two agents: a of two turns with a text put in between, b of one, and a turn of b that found no room."""
    made = Turns()
    made.spans = [(0, 2, "a"), (3, 5, "b"), (5, 6, "a"), (0, 0, "b")]
    return made


def test_each_sampled_token_has_the_number_of_its_agent() -> None:
    a, also_a, put_in, b, also_b, last = turns().agent_ids(6)
    assert a == also_a == last
    assert b == also_b
    assert (put_in, len({a, b, put_in})) == (0, 3)
    other = Turns()
    other.spans = [(0, 1, "b")]
    assert other.agent_ids(1) == [b], "the name alone decides"
    other.spans = [(0, 1, "")]
    assert 0 < other.agent_ids(1)[0] < 2**31, "an agent without a name is one"


def test_rewards_sit_on_the_last_token_of_their_turn_and_add_up() -> None:
    made = turns()
    made.reward(1.0, 0)
    made.reward(0.5, 0, "b")
    made.reward(2.0, agent_name="a")
    made.reward(-1.0, 1, "a")
    assert made.rewards == {1: 1.0, 4: 0.5, 5: 1.0}
    rewards = made.step_rewards(6)
    assert [i for i, value in enumerate(rewards) if not math.isnan(value)] == [1, 4, 5]


def test_the_reward_of_a_turn_without_tokens_is_that_of_its_agents_turn_before() -> None:
    """Where there is none, nothing that was sampled has earned it, and the episode still has."""
    made = turns()
    made.reward(9.0)
    made.spans.append((0, 0, "c"))
    made.reward(-2.0, agent_name="c")
    assert made.rewards == {4: 9.0, -1: -2.0}
    assert [value for value in made.step_rewards(6) if not math.isnan(value)] == [9.0]


@pytest.mark.parametrize(("turn", "agent_name"), [(4, None), (-1, None), (2, "a"), (None, "c")])
def test_a_turn_that_is_not_there_has_no_reward(turn: int | None, agent_name: str | None) -> None:
    made = turns()
    with refuses(IndexError, "add_step_reward", f"turn={turn}", f"agent_name={agent_name!r}"):
        made.reward(1.0, turn, agent_name)
    with refuses(ValueError, "add_step_reward", "nan"):
        made.reward(math.nan)
    assert not made.rewards
