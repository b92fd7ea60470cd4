from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from grpo_dist.errors import BatchError
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.runtime.batch_ref import DataProtoRef
from tests.messages import refuses

here = pytest.mark.usefixtures("store_here")


def put(first: int, rows: int, length: int = 2) -> DataProtoRef:
    """Rows first, first + 1, ...: a ragged `responses` column of that number, and a small `score`."""
    numbers = range(first, first + rows)
    responses = Ragged.from_rows([[i] * (length + i % 2) for i in numbers], torch.int32)
    columns = {"responses": responses, "score": torch.tensor([float(i) for i in numbers])}
    return DataProtoRef.put(DataProto.from_dict(columns, {"uid": [f"p{i}" for i in numbers]}))


def log_probs(first: int, rows: int) -> DataProtoRef:
    column = Ragged.from_rows([[-float(i)] * (2 + i % 2) for i in range(first, first + rows)], torch.float32)
    return DataProtoRef.put(DataProto.from_dict({"old_log_probs": column}))


def firsts(handle: DataProtoRef, name: str = "responses") -> list[float]:
    return [row[0].item() for row in handle.fetch((name,))[name].rows()]


@here
def test_put_and_fetch() -> None:
    handle = put(0, 3)
    assert len(handle) == 3
    assert handle.columns == ("responses", "score", "uid")
    data = handle.fetch(("responses", "uid"))
    assert list(data.columns()) == ["responses", "uid"]
    assert [row.tolist() for row in data["responses"].rows()] == [[0, 0], [1, 1, 1], [2, 2]]
    assert data["uid"].tolist() == ["p0", "p1", "p2"]
    assert handle["score"].tolist() == [0, 1, 2]
    assert handle.reorder([2, 0])["uid"].tolist() == ["p2", "p0"]
    with refuses(BatchError, "'responses'", "driver", "score, uid"):
        handle["responses"]


@here
def test_reorder_slice_split() -> None:
    handle = put(0, 5)
    assert firsts(handle.reorder([4, 3, 0, 2]).reorder([1, 3, 3])) == [3, 2, 2]
    assert handle.slice(1, 3)["score"].tolist() == [1, 2]
    parts = handle.split([2, 0, 3])
    assert [part["score"].tolist() for part in parts] == [[0, 1], [], [2, 3, 4]]
    assert [firsts(part) for part in (parts[0], parts[2])] == [[0, 1], [2, 3, 4]]


@here
def test_no_rows() -> None:
    """A rank may have none: it reads nothing, and its own columns join the others'."""
    assert len(put(0, 3).slice(0, 0).fetch(("responses",))) == 0
    assert len(DataProtoRef()) == 0
    joined = DataProtoRef.concat([log_probs(0, 2), log_probs(0, 0), log_probs(2, 1)])
    assert firsts(joined, "old_log_probs") == [0, -1, -2]
    assert firsts(joined.reorder([2, 0]), "old_log_probs") == [-2, 0]


@here
def test_concat_keeps_the_order_over_blocks() -> None:
    joined = DataProtoRef.concat([put(0, 2), put(10, 3), put(20, 1)])
    assert firsts(joined) == [0, 1, 10, 11, 12, 20]
    mixed = joined.reorder([5, 0, 3, 1, 3])
    assert (firsts(mixed), mixed["score"].tolist()) == ([20, 0, 11, 1, 11], [20, 0, 11, 1, 11])
    assert firsts(DataProtoRef.concat([mixed, joined.slice(2, 3)])) == [20, 0, 11, 1, 11, 10]
    part = replace(put(0, 1), small={"score": np.array([0.5]), "reward_extra/hit": np.array([1.0])})
    lacking = DataProtoRef.concat([put(5, 2), part])
    assert lacking["score"].tolist() == [5, 6, 0.5]
    assert np.array_equal(lacking["reward_extra/hit"], [np.nan, np.nan, 1.0], equal_nan=True)


@here
def test_union_of_columns_cut_differently() -> None:
    """Responses were made by three groups, log-probs by two ranks: rows correspond all the same."""
    batch = DataProtoRef.concat([put(0, 2), put(2, 1), put(3, 2)])
    both = batch.union(DataProtoRef.concat([log_probs(0, 3), log_probs(3, 2)])).reorder([4, 1, 2])
    assert (firsts(both), firsts(both, "old_log_probs")) == ([4, 1, 2], [-4, -1, -2])
    data = both.fetch(("old_log_probs", "responses"))
    assert torch.equal(data["responses"].lengths, data["old_log_probs"].lengths)


@here
def test_what_nobody_reads_is_dropped_and_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, extra = put(0, 2), log_probs(0, 2)
    both = batch.union(extra)
    selected = both.select(("old_log_probs",))
    assert (selected.columns, len(selected.frames)) == (("old_log_probs",), 1)
    assert selected["uid"].tolist() == ["p0", "p1"]
    joined = DataProtoRef.concat([put(0, 2), put(2, 2), put(4, 2)])
    assert len(joined.reorder([0, 5]).frames[0].blocks) == 2, "the block that no row needs is let go"
    read: list[Any] = []
    get = ray.get
    monkeypatch.setattr(ray, "get", lambda refs: (read.extend(refs), get(refs))[1])
    assert list(both.fetch(("old_log_probs",)).columns()) == ["old_log_probs"]
    assert read == list(extra.frames[0].blocks)


@here
def test_mistakes_are_named() -> None:
    batch = put(0, 2)
    with refuses(BatchError, "'fetch'", "'ref_log_probs'", "ref", "responses"):
        batch.fetch(("responses", "ref_log_probs"))
    with refuses(BatchError, "'advantages'", "targets"):
        batch.select(("advantages",))
    with refuses(BatchError, "handles", "2 and 3"):
        batch.union(log_probs(0, 3))
    with refuses(BatchError, "both", "'responses'"):
        batch.union(put(0, 2))
    for other in (log_probs(0, 2), batch.union(log_probs(0, 2))):
        with refuses(BatchError, "columns differ"):
            DataProtoRef.concat([other, batch])
    with pytest.raises(IndexError):
        batch.reorder(np.array([2]))


@pytest.mark.ray
def test_handles_travel_and_do_not_grow_with_responses_which_are_mapped_without_a_copy(local_ray: None) -> None:
    joined = DataProtoRef.concat([put(0, 2), put(10, 2)]).reorder([3, 0])
    assert firsts(ray.get(ray.put([joined]))[0]) == [11, 0]
    (block,) = put(0, 1000).frames[0].blocks
    first, second = ray.get(block), ray.get(block)
    assert first["responses"].values.data_ptr() == second["responses"].values.data_ptr()
    for rows in (1, 64):
        short, long = (len(ray.cloudpickle.dumps(put(0, rows, length))) for length in (8, 4096))
        assert abs(long - short) <= 64
        assert short < 3000 + 100 * rows
