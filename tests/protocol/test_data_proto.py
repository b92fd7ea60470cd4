"""Batches: their columns, their rows, the way over the wire and to disk, what columns are, and metrics of parts."""

import copy
import math
import pickle
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from grpo_dist.errors import BatchError
from grpo_dist.protocol import DataProto, Max, Mean, Ragged, Sum, merge_metrics, metric_values
from grpo_dist.protocol.fields import FIELDS, columns_for, require
from grpo_dist.protocol.parquet import read_parquet, write_parquet
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


def lists(column: Ragged) -> list[list]:
    return [row.tolist() for row in column.rows()]


def content(data: DataProto) -> dict:
    """Every column as plain lists."""
    columns = data.columns().items()
    return {name: lists(each) if isinstance(each, Ragged) else each.tolist() for name, each in columns}


WHOLE = {"x": [10, 20, 30], "y": [[0, 1], [2, 3], [4, 5]], "r": [[1], [2, 3], []], "uid": ["a", "b", "c"]}


# --- columns -----------------------------------------------------------------------------------------------------
def test_columns() -> None:
    data = batch()
    assert (len(data), len(DataProto())) == (3, 0)
    assert data["uid"].dtype == object
    assert content(data.select(["uid", "x"])) == {"x": [10, 20, 30], "uid": ["a", "b", "c"]}
    taken, rest = data.pop(["r"])
    assert (list(taken.columns()), list(rest.columns())) == (["r"], ["x", "y", "uid"])
    z = torch.tensor([7, 8, 9])
    more = DataProto.from_dict({"z": z, "x": torch.tensor([10, 20, 30])}, {"uid": ["a", "b", "c"]})
    assert content(data.union(more)) == WHOLE | {"z": [7, 8, 9]}
    assert len(DataProto.concat([data, data])) == 6
    assert content(DataProto.concat([data.slice(0, 1), data.slice(1, 3)])) == WHOLE
    assert content(data) == WHOLE, "no operation changes the batch"
    assert len(DataProto.concat([])) == 0
    with pytest.raises(AttributeError):
        data.batch = {}  # type: ignore[misc]


def test_union_refuses_a_column_that_differs() -> None:
    for name, column in (
        ("x", torch.tensor([10, 20, 31])),
        ("x", torch.tensor([10.0, 20.0, 30.0])),
        ("r", Ragged.from_rows([[1], [2], [3]], torch.int32)),
        ("r", torch.tensor([1, 2, 3])),
    ):
        with refuses(BatchError, "both", f"'{name}'", "different values"):
            batch().union(DataProto.from_dict({name: column}))


def test_union_compares_values_with_what_they_hold() -> None:
    """One is equal to a copy of itself, and never to the other."""
    for one, other in (
        ("a", "b"),
        ([1, [2, 3]], [1, [2, 4]]),
        ({"a": np.array([1, 2])}, {"a": np.array([1, 3])}),
        (math.nan, 0.0),
        (np.array([1, math.nan]), np.array([1, 0.0])),
        ([np.array([1, 2]), "t"], [np.array([1, 2, 3]), "t"]),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 0.0])),
        (np.array([{"a": 1}, None], dtype=object), np.array([{"a": 2}, None], dtype=object)),
        (np.array(1.0), [1.0]),
        ({"a": 1}, {"b": 1}),
    ):
        first, again = DataProto.from_dict({}, {"v": [one]}), DataProto.from_dict({}, {"v": [copy.deepcopy(one)]})
        assert len(first.union(again)) == 1
        for pair in ((one, other), (other, one)):
            left, right = (DataProto.from_dict({}, {"v": [value]}) for value in pair)
            with refuses(BatchError, "'v'"):
                left.union(right)
    column = {"x": torch.tensor([1.0, math.nan]), "r": Ragged.from_rows([[math.nan], [1]], torch.float32)}
    DataProto.from_dict(column).union(DataProto.from_dict(copy.deepcopy(column)))


# --- rows --------------------------------------------------------------------------------------------------------
def test_index() -> None:
    for rows, expected in (
        ([2, 0], [2, 0]),
        (np.array([1, 1]), [1, 1]),
        (torch.tensor([2, 2, 1]), [2, 2, 1]),
        (slice(1, None), [1, 2]),
        (np.array([True, False, True]), [0, 2]),
        ([], []),
    ):
        picked = batch().index(rows)
        assert content(picked) == {name: [column[i] for i in expected] for name, column in WHOLE.items()}
        assert picked["r"].values.dtype == torch.int32


def ragged() -> Ragged:
    """Rows [1, 2], [], [3], [4, 5, 6]."""
    return Ragged.from_rows([[1, 2], [], [3], [4, 5, 6]], torch.int32)


def test_ragged_rows() -> None:
    column = ragged()
    assert column.values.tolist() == [1, 2, 3, 4, 5, 6]
    assert column.offsets.tolist() == [0, 2, 2, 3, 6]
    assert (column.values.dtype, column.offsets.dtype) == (torch.int32, torch.int64)
    assert (column.lengths.tolist(), len(column)) == ([2, 0, 1, 3], 4)
    mixed = Ragged.from_rows([np.array([1.5]), torch.tensor([2.5, 3.5]), [4]], torch.float32)
    assert lists(mixed) == [[1.5], [2.5, 3.5], [4.0]]
    empty = Ragged.from_rows([], torch.float32)
    assert (len(empty), empty.values.dtype, empty.offsets.tolist()) == (0, torch.float32, [0])
    assert lists(Ragged.concat([column[np.array([3])], column[slice(0, 2)]])) == [[4, 5, 6], [1, 2], []]


def test_padded_and_back() -> None:
    padded = ragged().to_padded(-1)
    assert padded.tolist() == [[1, 2, -1], [-1, -1, -1], [3, -1, -1], [4, 5, 6]]
    assert padded.dtype == torch.int32
    for column in (ragged(), Ragged.from_rows([[0, 5, 0], [0]], torch.int64)):
        assert lists(Ragged.from_padded(column.to_padded(0), column.lengths)) == lists(column)
    assert ragged()[slice(0, 0)].to_padded(0).shape == (0, 0)


# --- wire and disk -----------------------------------------------------------------------------------------------
def pickled(length: int) -> tuple[bytes, list[pickle.PickleBuffer]]:
    data = DataProto.from_dict(
        {"responses": Ragged.from_rows([np.arange(length)] * 4, torch.int32), "score": torch.arange(4.0).bfloat16()},
        {"uid": ["a", "a", "b", "b"]},
    )
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(data, protocol=5, buffer_callback=buffers.append), buffers


def test_pickling_is_out_of_band_and_of_a_slice_alone() -> None:
    short, _ = pickled(8)
    long, buffers = pickled(100_000)
    assert len(short) < 2000
    assert abs(len(long) - len(short)) <= 16, "in-band bytes must not grow with the data"
    assert sorted(b.raw().nbytes for b in buffers) == [4 * 2, 5 * 8, 4 * 100_000 * 4]
    whole = DataProto.from_dict({"x": torch.zeros(10_000)})
    assert len(pickle.dumps(whole.slice(0, 10), protocol=5)) < 1000


def test_unpickling_shares_read_only_memory_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    in_band, buffers = pickled(50)
    stored = [bytes(buffer.raw()) for buffer in buffers]  # bytes: nobody can write them, as in the object store
    data = pickle.loads(in_band, buffers=stored)
    assert content(data)["responses"] == [list(range(50))] * 4
    assert data["score"].equal(torch.arange(4.0).bfloat16()), "numpy lacks the type"
    addresses = {np.frombuffer(block, np.uint8).ctypes.data for block in stored}
    shared = (data["responses"].values, data["responses"].offsets, data["score"])
    assert {tensor.data_ptr() for tensor in shared} == addresses, "a copy was made"
    assert not recwarn.list


def test_save_and_load(tmp_path: Path) -> None:
    """Columns share offsets, and a slice the memory of its batch."""
    r = batch()["r"]
    more = {"scores": Ragged(r.values.float(), r.offsets), "z": torch.arange(9)[3:6]}
    batch().union(DataProto.from_dict(more)).save(tmp_path / "batch")
    loaded = DataProto.load(tmp_path / "batch")
    assert content(loaded) == WHOLE | {"scores": [[1], [2, 3], []], "z": [3, 4, 5]}
    assert loaded["r"].values.dtype == torch.int32
    assert loaded["uid"].dtype == object


def run_batch() -> DataProto:
    columns = {
        "responses": Ragged.from_rows([[5, 6, 2], [], [7]], torch.int32),
        "advantages": Ragged.from_rows([[0.5, 0.5, 0.1], [], [float("nan")]], torch.float32),
        "response_mask": Ragged.from_rows([[1, 0, 1], [], [1]], torch.int8),
        "score": torch.tensor([1.0, float("nan"), 1e-30]),
        "truncated": torch.tensor([0, 1, 0]),
    }
    return DataProto.from_dict(columns, {"uid": ["a", "a", "ü\x00"]})


def test_what_is_written_as_parquet_is_read(tmp_path: Path) -> None:
    """Other programs see a list for each row; columns that are asked for and not there are left out."""
    write_parquet(run_batch(), tmp_path / "1.parquet")
    found = read_parquet(tmp_path / "1.parquet")
    assert found.columns().keys() == run_batch().columns().keys()
    for name, column in run_batch().batch.items():
        values, read = (c.values if isinstance(c, Ragged) else c for c in (column, found[name]))
        assert read.dtype == values.dtype
        assert torch.equal(read.nan_to_num(nan=9), values.nan_to_num(nan=9))
        if isinstance(column, Ragged):
            assert found[name].lengths.tolist() == [3, 0, 1]
    assert found["uid"].tolist() == ["a", "a", "ü\x00"]
    assert pq.read_table(tmp_path / "1.parquet").column("responses").to_pylist() == [[5, 6, 2], [], [7]]
    assert list(read_parquet(tmp_path / "1.parquet", ["uid", "responses", "values"]).columns()) == ["responses", "uid"]
    write_parquet(run_batch().slice(0, 0), tmp_path / "none.parquet")
    none = read_parquet(tmp_path / "none.parquet")
    assert (len(none), none["responses"].offsets.tolist()) == (0, [0])


# --- mistakes ----------------------------------------------------------------------------------------------------
def test_mistakes_name_the_column(tmp_path: Path) -> None:
    with refuses(BatchError, "rows", "{'x': 2, 'uid': 3}"):
        DataProto.from_dict({"x": torch.zeros(2)}, {"uid": ["a", "b", "c"]})
    with refuses(BatchError, "'x'", "tensor", "object column"):
        DataProto.from_dict({"x": torch.zeros(1)}, {"x": ["a"]})
    for ask in (lambda: batch()["q"], lambda: batch().select(["x", "q"]), lambda: batch().pop(["q"])):
        with refuses(BatchError, "'q'", "r, uid, x, y"):
            ask()
    with refuses(BatchError, "columns", "['r', 'uid', 'y']"):
        DataProto.concat([batch(), batch().select(["x"])])
    with refuses(BatchError, "rows", "'x': 3", "'z': 2"):
        batch().union(DataProto.from_dict({"z": torch.zeros(2)}))
    for column in (Ragged(torch.ones(2, 3), torch.tensor([0, 2])), torch.ones(1, 2)):  # of other kinds
        with refuses(BatchError, "states"):
            write_parquet(DataProto.from_dict({"states": column}), tmp_path / "1.parquet")


def test_mistakes_of_offsets_are_named() -> None:
    with refuses(BatchError, "offsets", "[3]", "2"):
        Ragged(torch.tensor([1, 2]), torch.tensor([0, 3]))
    with refuses(BatchError, "offsets", "[]", "0"):
        Ragged(torch.tensor([]), torch.tensor([], dtype=torch.int64))
    with refuses(BatchError, "offsets", "[5]", "4"):  # a length beyond the tensor's width
        Ragged.from_padded(torch.zeros(2, 2), torch.tensor([2, 3]))


# --- the contract of columns --------------------------------------------------------------------------------------
def test_a_missing_column_is_named_with_its_maker() -> None:
    require("update", ["prompts", "responses", "uid"], ["responses"])
    require("update", [], [])
    with refuses(BatchError, "'update'", "'old_log_probs'", "actor", "'ref_log_probs'", "ref", "prompts, responses"):
        require("update", ["responses", "prompts"], ["responses", "old_log_probs", "ref_log_probs"])
    with refuses(BatchError, "'score'", "'responses'", "no columns"):
        require("score", [], ["responses"])
    with refuses(BatchError, "'score'", "'reward_extra/acc'"):  # outside the contract
        require("score", ["responses"], ["reward_extra/acc"])


def test_the_driver_reads_small_fields_alone() -> None:
    for name, field in FIELDS.items():
        assert "driver" not in field.read_by or field.shape == "(N,)", name


def test_a_reader_gets_of_the_columns_that_are_there_those_that_it_reads() -> None:
    there = ["score", "prompts", "responses", "routes", "predecessors", "mine", "values"]
    assert columns_for(there, "forward") == ("prompts", "responses", "predecessors")
    assert columns_for(there, "forward", "router") == ("prompts", "responses", "routes", "predecessors")
    assert columns_for(there, "teacher") == columns_for([], "forward") == ()


# --- metrics -----------------------------------------------------------------------------------------------------
def test_metrics_of_parts() -> None:
    """A mean is weighted: 3 tokens of mean 1 and 1 token of 9 have 12 / 4, not 5; of nothing it is neutral."""
    assert Mean(3.0, 3).merge(Mean(9.0, 1)).value == 3.0
    assert Mean(0.0, 0).value == 0.0
    assert Mean(0.0, 0).merge(Mean(8.0, 2)).value == 4.0
    assert metric_values({"a": Mean(0.0, 0), "b": Sum(0.0), "c": Mean(0.0, 1)}) == {"b": 0.0, "c": 0.0}, "no number"
    assert Sum(2.0).merge(Sum(-0.5)).value == 1.5
    assert [Max(a).merge(Max(b)).value for a, b in ((2.0, -7.0), (-7.0, -2.0))] == [2.0, -2.0]
    assert pickle.loads(pickle.dumps({"a": Mean(1.0, 2), "b": Max(1.0)})) == {"a": Mean(1.0, 2), "b": Max(1.0)}


def test_merge_by_name_in_any_order() -> None:
    parts = [{"a": Mean(1.0, 1), "loss": Sum(1.0)}, {"a": Mean(6.0, 2)}, {"b": Max(3.0), "loss": Sum(2.0)}]
    expected = {"a": 7 / 3, "loss": 3.0, "b": 3.0}
    assert metric_values(merge_metrics(parts)) == pytest.approx(expected)
    assert metric_values(merge_metrics(reversed(parts))) == pytest.approx(expected)
    assert metric_values(merge_metrics([])) == {}
    assert parts[0] == {"a": Mean(1.0, 1), "loss": Sum(1.0)}, "the parts are as they were"
    with pytest.raises(AttributeError):  # kinds do not mix
        merge_metrics([{"a": Mean(1.0, 1)}, {"a": Sum(1.0)}])
