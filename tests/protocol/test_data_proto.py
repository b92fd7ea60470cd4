import copy
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_dist.errors import BatchError
from grpo_dist.protocol import DataProto, Ragged
from tests.messages import refuses


def batch() -> DataProto:
    """Three rows: dense x (3,), dense y (3, 2), ragged r, object uid."""
    return DataProto.from_dict(
        {
            "x": torch.tensor([10, 20, 30]),
            "y": torch.arange(6.0).reshape(3, 2),
            "r": Ragged.from_rows([[1], [2, 3], []], torch.int32),
        },
        {"uid": ["a", "b", "c"]},
    )


def content(data: DataProto) -> dict:
    """Every column as plain lists."""
    return {
        name: [row.tolist() for row in column.rows()] if isinstance(column, Ragged) else column.tolist()
        for name, column in data.columns().items()
    }


WHOLE = {"x": [10, 20, 30], "y": [[0, 1], [2, 3], [4, 5]], "r": [[1], [2, 3], []], "uid": ["a", "b", "c"]}


# --- columns -----------------------------------------------------------------------------------------------------
def test_columns() -> None:
    data = batch()
    assert len(data) == 3
    assert content(data) == WHOLE
    assert data["x"].tolist() == [10, 20, 30]
    assert data["uid"].dtype == object
    assert len(DataProto()) == 0


def test_select_pop() -> None:
    assert content(batch().select(["uid", "x"])) == {"x": [10, 20, 30], "uid": ["a", "b", "c"]}
    taken, rest = batch().pop(["r"])
    assert list(taken.columns()) == ["r"]
    assert list(rest.columns()) == ["x", "y", "uid"]


def test_union() -> None:
    more = DataProto.from_dict(
        {"z": torch.tensor([7, 8, 9]), "x": torch.tensor([10, 20, 30])}, {"uid": ["a", "b", "c"]}
    )
    both = batch().union(more)
    assert content(both) == WHOLE | {"z": [7, 8, 9]}


@pytest.mark.parametrize(
    "column",
    [
        {"x": torch.tensor([10, 20, 31])},
        {"x": torch.tensor([10.0, 20.0, 30.0])},
        {"r": Ragged.from_rows([[1], [2], [3]], torch.int32)},
        {"r": torch.tensor([1, 2, 3])},
    ],
    ids=["value", "dtype", "lengths", "kind"],
)
def test_union_refuses_a_column_that_differs(column: dict) -> None:
    name = next(iter(column))
    with refuses(BatchError, "both", f"'{name}'", "different values"):
        batch().union(DataProto.from_dict(column))
    with refuses(BatchError, "both", "'uid'"):
        batch().union(DataProto.from_dict({}, {"uid": ["a", "b", "d"]}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, [2, 3]], [1, [2, 4]]),
        ({"a": np.array([1, 2])}, {"a": np.array([1, 3])}),
        (math.nan, 0.0),
        (np.array([1, math.nan]), np.array([1, 0.0])),
        ([np.array([1, 2]), "t"], [np.array([1, 2, 3]), "t"]),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 0.0])),
        (np.array([{"a": 1}, None], dtype=object), np.array([{"a": 2}, None], dtype=object)),
        (np.array(1.0), [1.0]),
        ({"a": 1}, {"b": 1}),
    ],
)
def test_union_compares_values_with_what_they_hold(one: object, other: object) -> None:
    """One is equal to a copy of itself, and never to the other."""
    first, again = DataProto.from_dict({}, {"v": [one]}), DataProto.from_dict({}, {"v": [copy.deepcopy(one)]})
    assert len(first.union(again)) == 1
    for pair in ((one, other), (other, one)):
        left, right = (DataProto.from_dict({}, {"v": [value]}) for value in pair)
        with refuses(BatchError, "'v'"):
            left.union(right)
    column = {"x": torch.tensor([1.0, math.nan]), "r": Ragged.from_rows([[math.nan], [1]], torch.float32)}
    DataProto.from_dict(column).union(DataProto.from_dict(copy.deepcopy(column)))


# --- rows --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([2, 0], [2, 0]),
        (np.array([1, 1]), [1, 1]),
        (torch.tensor([0]), [0]),
        (slice(1, None), [1, 2]),
        (np.array([True, False, True]), [0, 2]),
        ([], []),
    ],
    ids=["list", "repeated", "tensor", "slice", "mask", "none"],
)
def test_index(rows: object, expected: list[int]) -> None:
    picked = batch().index(rows)
    assert content(picked) == {name: [column[i] for i in expected] for name, column in WHOLE.items()}


def test_slice() -> None:
    assert batch().slice(1, 3)["x"].tolist() == [20, 30]
    empty = batch().slice(0, 0)
    assert (len(empty), list(empty.columns())) == (0, ["x", "y", "r", "uid"])


def test_concat() -> None:
    assert content(DataProto.concat([batch().slice(0, 1), batch().slice(1, 3)])) == WHOLE
    assert len(DataProto.concat([batch(), batch()])) == 6
    assert len(DataProto.concat([])) == 0


def test_operations_leave_the_original_alone() -> None:
    data = batch()
    data.select(["x"]), data.pop(["x"]), data.index([2]), DataProto.concat([data, data])
    data.union(DataProto.from_dict({"z": torch.zeros(3)}))
    assert content(data) == WHOLE
    with pytest.raises(AttributeError):
        data.batch = {}  # type: ignore[misc]


# --- wire and disk -----------------------------------------------------------------------------------------------
def pickled(length: int) -> tuple[bytes, list[pickle.PickleBuffer]]:
    data = DataProto.from_dict(
        {"responses": Ragged.from_rows([np.arange(length)] * 4, torch.int32), "score": torch.arange(4.0)},
        {"uid": ["a", "a", "b", "b"]},
    )
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(data, protocol=5, buffer_callback=buffers.append), buffers


def test_pickling_is_out_of_band() -> None:
    short, _ = pickled(8)
    long, buffers = pickled(100_000)
    assert len(short) < 2000
    assert abs(len(long) - len(short)) <= 16, "in-band bytes must not grow with the data"
    assert sorted(b.raw().nbytes for b in buffers) == [4 * 4, 5 * 8, 4 * 100_000 * 4]


def test_unpickling_shares_read_only_memory() -> None:
    in_band, buffers = pickled(50)
    stored = [bytes(buffer.raw()) for buffer in buffers]  # bytes: nobody can write them, as in the object store
    data = pickle.loads(in_band, buffers=stored)
    assert content(data)["responses"] == [list(range(50))] * 4
    addresses = {np.frombuffer(block, np.uint8).ctypes.data for block in stored}
    shared = (data["responses"].values, data["responses"].offsets, data["score"])
    assert {tensor.data_ptr() for tensor in shared} == addresses, "a copy was made"


def test_unpickling_says_nothing_about_read_only_memory(recwarn: pytest.WarningsRecorder) -> None:
    in_band, buffers = pickled(50)
    pickle.loads(in_band, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert not recwarn.list


def test_pickling_a_slice_sends_the_slice_only() -> None:
    whole = DataProto.from_dict({"x": torch.zeros(10_000)})
    assert len(pickle.dumps(whole.slice(0, 10), protocol=5)) < 1000


def test_save_and_load(tmp_path: Path) -> None:
    batch().save(tmp_path / "batch")
    loaded = DataProto.load(tmp_path / "batch")
    assert content(loaded) == WHOLE
    assert loaded["r"].values.dtype == torch.int32
    assert loaded["uid"].dtype == object


def test_save_takes_columns_that_share_memory(tmp_path: Path) -> None:
    """Per-token columns often share their offsets; a slice shares the memory of its batch."""
    r = batch()["r"]
    data = DataProto.from_dict({"r": r, "scores": Ragged(r.values.float(), r.offsets), "z": torch.arange(9)[3:6]})
    data.save(tmp_path / "batch")
    expected = {"r": [[1], [2, 3], []], "scores": [[1], [2, 3], []], "z": [3, 4, 5]}
    assert content(DataProto.load(tmp_path / "batch")) == expected


# --- mistakes ----------------------------------------------------------------------------------------------------
def test_mistakes_name_the_column() -> None:
    with refuses(BatchError, "rows", "{'x': 2, 'uid': 3}"):
        DataProto.from_dict({"x": torch.zeros(2)}, {"uid": ["a", "b", "c"]})
    with refuses(BatchError, "'x'", "tensor", "object column"):
        DataProto.from_dict({"x": torch.zeros(1)}, {"x": ["a"]})
    for ask in (
        lambda: batch()["q"],
        lambda: batch().select(["x", "q"]),
        lambda: batch().pop(["q"]),
    ):
        with refuses(BatchError, "'q'", "r, uid, x, y"):
            ask()
    with refuses(BatchError, "columns", "['r', 'uid', 'y']"):
        DataProto.concat([batch(), batch().select(["x"])])
    with refuses(BatchError, "rows", "'x': 3", "'z': 2"):
        batch().union(DataProto.from_dict({"z": torch.zeros(2)}))
