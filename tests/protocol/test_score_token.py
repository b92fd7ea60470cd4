"""A token behind each response, and labels that move to the token at which their value is read."""

from __future__ import annotations

import torch

from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.score_token import SCORE_TOKEN, with_score_token

TWO_ROWS = {"prompts": [[4, 5], [4, 5]], "responses": [[7, 8], []]}


def test_a_score_token_behind_every_response() -> None:
    columns = {name: Ragged.from_rows(rows, torch.int32) for name, rows in TWO_ROWS.items()}
    made = with_score_token(DataProto.from_dict(columns, {"uid": ["a", "a"]}))
    assert [row.tolist() for row in made["prompts"].rows()] == TWO_ROWS["prompts"]
    assert [row.tolist() for row in made["responses"].rows()] == [[7, 8, SCORE_TOKEN], [SCORE_TOKEN]]
    assert [row.tolist() for row in made["response_mask"].rows()] == [[0, 0, 1], [1]]
    assert list(made["uid"]) == ["a", "a"]
    assert "uid" not in with_score_token(DataProto(columns)).columns()
    assert len(with_score_token(DataProto())) == 0, "a rank without rows"


def test_labels_move_to_the_token_at_which_their_value_is_read() -> None:
    columns = {name: Ragged.from_rows(rows, torch.int32) for name, rows in TWO_ROWS.items()}
    labels = Ragged.from_rows([[0, 1], []], torch.int8)
    made = with_score_token(DataProto({**columns, "labels": labels}))
    assert [row.tolist() for row in made["labels"].rows()] == [[-1, 0, 1], [-1]]
    assert [row.tolist() for row in made["response_mask"].rows()] == [[0, 1, 1], [0]]
