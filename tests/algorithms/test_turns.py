"""Turns in rows with branches: what was said before them, and what answers them; by hand."""

from __future__ import annotations

import torch

from grpo_dist.algorithms.turns import answers, turn_states

# A row with branches, and two tokens of padding: a turn of two tokens, "9", a turn that is sampled twice, a prompt of a
# sub-agent and its turn, "8" as another answer to the first turn, a turn that is cut in two by another try at its end,
# and what follows a history in which the first turn is written in another way.
TOKENS = torch.tensor([[5, 6, 9, 7, 4, 1, 9, 2, 8, 3, 3, 6, 9, 7, 0, 0]])
SAMPLED = torch.tensor([[1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 0, 0]])
FOLLOWS = torch.tensor([[-1, 0, 1, 2, 2, -3, 5, 6, 1, 8, 9, 9, 0, 12, -1, -1]])


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
