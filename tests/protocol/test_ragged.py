import numpy as np
import pytest
import torch

from grpo_dist.errors import BatchError
from grpo_dist.protocol import Ragged
from tests.messages import refuses


def ragged() -> Ragged:
    """Rows [1, 2], [], [3], [4, 5, 6]."""
    return Ragged.from_rows([[1, 2], [], [3], [4, 5, 6]], torch.int32)


def lists(column: Ragged) -> list[list]:
    return [row.tolist() for row in column.rows()]


def test_from_rows() -> None:
    column = ragged()
    assert column.values.tolist() == [1, 2, 3, 4, 5, 6]
    assert column.offsets.tolist() == [0, 2, 2, 3, 6]
    assert column.values.dtype == torch.int32
    assert column.offsets.dtype == torch.int64
    assert column.lengths.tolist() == [2, 0, 1, 3]
    assert len(column) == 4


def test_from_rows_takes_arrays_and_tensors_and_nothing() -> None:
    mixed = Ragged.from_rows([np.array([1.5]), torch.tensor([2.5, 3.5]), [4]], torch.float32)
    assert lists(mixed) == [[1.5], [2.5, 3.5], [4.0]]
    empty = Ragged.from_rows([], torch.float32)
    assert (len(empty), empty.values.dtype, empty.offsets.tolist()) == (0, torch.float32, [0])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (np.array([3, 0]), [[4, 5, 6], [1, 2]]),
        (torch.tensor([2, 2, 1]), [[3], [3], []]),
        (slice(1, 3), [[], [3]]),
        (np.array([True, False, False, True]), [[1, 2], [4, 5, 6]]),
        (np.array([], dtype=np.int64), []),
    ],
    ids=["array", "repeated", "slice", "mask", "none"],
)
def test_rows_by_index(rows: object, expected: list) -> None:
    picked = ragged()[rows]
    assert lists(picked) == expected
    assert picked.values.dtype == torch.int32
    assert lists(ragged()) == [[1, 2], [], [3], [4, 5, 6]], "the original is as it was"


def test_concat() -> None:
    assert lists(Ragged.concat([ragged()[np.array([3])], ragged()[slice(0, 2)]])) == [[4, 5, 6], [1, 2], []]


def test_padded_and_back() -> None:
    padded = ragged().to_padded(-1)
    assert padded.tolist() == [[1, 2, -1], [-1, -1, -1], [3, -1, -1], [4, 5, 6]]
    assert padded.dtype == torch.int32
    assert lists(Ragged.from_padded(padded, ragged().lengths)) == lists(ragged())
    assert ragged()[slice(0, 0)].to_padded(0).shape == (0, 0)


def test_a_value_equal_to_the_padding_is_kept() -> None:
    """Lengths decide, never the values."""
    column = Ragged.from_rows([[0, 5, 0], [0]], torch.int64)
    assert lists(Ragged.from_padded(column.to_padded(0), column.lengths)) == [[0, 5, 0], [0]]


def test_mistakes_are_named() -> None:
    with refuses(BatchError, "offsets", "[3]", "2"):
        Ragged(torch.tensor([1, 2]), torch.tensor([0, 3]))
    with refuses(BatchError, "offsets", "[]", "0"):
        Ragged(torch.tensor([]), torch.tensor([], dtype=torch.int64))
    with refuses(BatchError, "offsets", "[5]", "4"):  # a length beyond the tensor's width
        Ragged.from_padded(torch.zeros(2, 2), torch.tensor([2, 3]))
