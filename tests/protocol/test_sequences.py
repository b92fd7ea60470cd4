"""Branches, recorded experts, prompts of a teacher, and a token behind each response."""

from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.sequences import (
    SCORE_TOKEN,
    TEACHER_PROMPTS,
    are_unknown,
    as_teacher_reads,
    branch_starts,
    count_unknown,
    last_branch,
    route_columns,
    scored_branches,
    unknown_routes,
    with_score_token,
)


def ragged(*rows: list[int]) -> Ragged:
    return Ragged.from_rows(list(rows), torch.int32)


def lists(column: Ragged) -> list[list]:
    return [row.tolist() for row in column.rows()]


def test_the_last_branch_goes_back_to_the_prompt() -> None:
    for follows, place, tokens in (
        ([-1, 0, 1, 0, 3, -3, 4, 6], -1, [0, 3, 4, 6, 7]),
        ([-1, 0, -3, 2], -3, [2, 3]),  # from within the prompt
        ([-1, 0, 1], -1, [0, 1, 2]),
        ([], -1, []),
    ):
        found = last_branch(follows)
        assert (found[0], found[1].tolist()) == (place, tokens)


def test_branches_begin_where_a_token_does_not_follow_the_one_before() -> None:
    assert branch_starts([-1, 0, 1, 0, 3, -3, 4, 6]).tolist() == [3, 5, 6]
    assert branch_starts(torch.tensor([-2, 0])).tolist() == [0]
    assert branch_starts([-1, 0, 1]).tolist() == branch_starts([]).tolist() == []


def test_text_is_that_of_the_last_branch() -> None:
    responses = ragged([5, 6, 7], [8])
    assert scored_branches(DataProto.from_dict({"responses": responses})) is responses
    tree = DataProto.from_dict({"responses": responses, "predecessors": ragged([-1, 0, 0], [-1])})
    assert lists(scored_branches(tree)) == [[5, 7], [8]]


def rows(*numbers: int, dtype: type = np.uint8) -> np.ndarray:
    """A token for each number, of 3 layers with 2 experts; -1: not known."""
    known = np.array([[[n, n + 1]] * 3 for n in numbers])
    return np.where(np.array(numbers)[:, None, None] < 0, np.iinfo(dtype).max, known).astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_columns(dtype: type, tmp_path: Path) -> None:
    """A prompt of 2 tokens, and responses of 2, 1 and 1; of the second the engine was asked for less."""
    given = [rows(1, 2, 3, -1, dtype=dtype), rows(-1, dtype=dtype), None]
    data = DataProto.from_dict(route_columns(2, [2, 1, 1], given))
    assert data["prompt_routes"].values.shape == (6, 3, 2)
    assert data["prompt_routes"].lengths.tolist() == [2, 2, 2]
    assert data["routes"].lengths.tolist() == [2, 1, 1]
    assert data["prompt_routes"].values[:, 2, 1].tolist() == [2, 3] * 3, "the first one's, for all"
    assert are_unknown(data["routes"].values).tolist() == [False, True, True, True]
    assert data["routes"].values[0].tolist() == [[3, 4]] * 3
    turned = data.index([1, 0])
    assert turned["routes"].rows()[1].int().tolist() == [[[3, 4]] * 3, [[np.iinfo(dtype).max] * 2] * 3]
    data.save(tmp_path / "columns")
    assert torch.equal(DataProto.load(tmp_path / "columns")["routes"].values.int(), data["routes"].values.int())


def test_what_is_not_known() -> None:
    """Of 256 experts the last one has the number 255. Nothing recorded gives no columns."""
    last = torch.tensor([[[255, 3], [255, 0]], [[255, 255], [255, 255]]], dtype=torch.uint8)
    assert are_unknown(last).tolist() == [False, True]
    assert unknown_routes(2, rows(1)).tolist() == [[[255, 255]] * 3] * 2
    assert route_columns(2, [1], [None]) == {}


def test_unknown_ones_are_counted_where_something_follows() -> None:
    """In the second row, tokens 0 and 2 are followed by nothing, and 1 by 3."""
    given = [rows(1, -1, 3, -1, 5, -1), rows(1, 1, -1, -1, -1, -1)]
    columns = route_columns(2, [4, 4], given)
    follows = [np.array([-1, 0, 1, 2]), np.array([-1, -1, -2, 1])]
    assert count_unknown(columns, follows).tolist() == [2, 2], "the prompt's second, and one of the response's"


def test_a_teachers_prompt_stands_in_place_of_the_own_where_there_is_one() -> None:
    columns = {"prompts": ragged([1, 2], [3]), "responses": ragged([4], [5, 6])}
    data = DataProto.from_dict(columns, {"uid": ["a", "b"]})
    assert as_teacher_reads(data) is data
    shown = DataProto.from_dict({TEACHER_PROMPTS: ragged([], [7, 8, 9])})
    read = as_teacher_reads(data.union(shown))
    assert lists(read["prompts"]) == [[1, 2], [7, 8, 9]]
    assert read["prompts"].values.dtype == torch.int32
    assert lists(read["responses"]) == [[4], [5, 6]]
    assert TEACHER_PROMPTS not in read.columns()
    assert list(read["uid"]) == ["a", "b"]


def two_rows() -> dict[str, Ragged]:
    return {"prompts": ragged([4, 5], [4, 5]), "responses": ragged([7, 8], [])}


def test_a_score_token_behind_every_response() -> None:
    columns = two_rows()
    made = with_score_token(DataProto.from_dict(columns, {"uid": ["a", "a"]}))
    assert lists(made["prompts"]) == [[4, 5], [4, 5]]
    assert lists(made["responses"]) == [[7, 8, SCORE_TOKEN], [SCORE_TOKEN]]
    assert lists(made["response_mask"]) == [[0, 0, 1], [1]]
    assert list(made["uid"]) == ["a", "a"]
    assert "uid" not in with_score_token(DataProto(columns)).columns()
    assert len(with_score_token(DataProto())) == 0, "a rank without rows"


def test_labels_move_to_the_token_at_which_their_value_is_read() -> None:
    made = with_score_token(DataProto(two_rows() | {"labels": Ragged.from_rows([[0, 1], []], torch.int8)}))
    assert lists(made["labels"]) == [[-1, 0, 1], [-1]]
    assert lists(made["response_mask"]) == [[0, 1, 1], [0]]
