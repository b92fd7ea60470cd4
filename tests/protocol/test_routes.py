"""The columns of recorded experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_dist.protocol import DataProto
from grpo_dist.protocol.routes import are_unknown, count_unknown, route_columns, unknown_routes


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


def test_nothing_recorded_gives_no_columns() -> None:
    assert route_columns(2, [1], [None]) == {}


def test_an_expert_with_the_largest_number_is_known() -> None:
    """Of 256 experts the last one has the number 255."""
    last = torch.tensor([[[255, 3], [255, 0]], [[255, 255], [255, 255]]], dtype=torch.uint8)
    assert are_unknown(last).tolist() == [False, True]


def test_unknown_ones_are_counted_where_something_follows() -> None:
    """In the second row, tokens 0 and 2 are followed by nothing, and 1 by 3."""
    given = [rows(1, -1, 3, -1, 5, -1), rows(1, 1, -1, -1, -1, -1)]
    columns = route_columns(2, [4, 4], given)
    follows = [np.array([-1, 0, 1, 2]), np.array([-1, -1, -2, 1])]
    assert count_unknown(columns, follows).tolist() == [2, 2], "the prompt's second, and one of the response's"


def test_unknown_routes() -> None:
    assert unknown_routes(2, rows(1)).tolist() == [[[255, 255]] * 3] * 2
