"""Responses with branches, on paper."""

from __future__ import annotations

import torch

from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.branches import branch_starts, last_branch, scored_branches


def test_the_last_branch_goes_back_to_the_prompt() -> None:
    place, tokens = last_branch([-1, 0, 1, 0, 3, -3, 4, 6])
    assert (place, tokens.tolist()) == (-1, [0, 3, 4, 6, 7])
    place, tokens = last_branch([-1, 0, -3, 2])
    assert (place, tokens.tolist()) == (-3, [2, 3]), "from within the prompt"
    place, tokens = last_branch([-1, 0, 1])
    assert (place, tokens.tolist()) == (-1, [0, 1, 2])
    place, tokens = last_branch([])
    assert (place, tokens.tolist()) == (-1, [])


def test_branches_begin_where_a_token_does_not_follow_the_one_before() -> None:
    assert branch_starts([-1, 0, 1, 0, 3, -3, 4, 6]).tolist() == [3, 5, 6]
    assert branch_starts(torch.tensor([-2, 0])).tolist() == [0]
    assert branch_starts([-1, 0, 1]).tolist() == branch_starts([]).tolist() == []


def test_text_is_that_of_the_last_branch() -> None:
    responses = Ragged.from_rows([[5, 6, 7], [8]], torch.int32)
    plain = DataProto.from_dict({"responses": responses})
    assert scored_branches(plain) is responses
    follows = Ragged.from_rows([[-1, 0, 0], [-1]], torch.int32)
    tree = DataProto.from_dict({"responses": responses, "predecessors": follows})
    assert [row.tolist() for row in scored_branches(tree).rows()] == [[5, 7], [8]]
