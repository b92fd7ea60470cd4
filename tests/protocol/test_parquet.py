"""Batches as Parquet files."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from grpo_dist.errors import BatchError
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.parquet import read_parquet, write_parquet


def batch() -> DataProto:
    columns = {
        "responses": Ragged.from_rows([[5, 6, 2], [], [7]], torch.int32),
        "advantages": Ragged.from_rows([[0.5, 0.5, 0.1], [], [float("nan")]], torch.float32),
        "response_mask": Ragged.from_rows([[1, 0, 1], [], [1]], torch.int8),
        "score": torch.tensor([1.0, float("nan"), 1e-30]),
        "truncated": torch.tensor([0, 1, 0]),
    }
    return DataProto.from_dict(columns, {"uid": ["a", "a", "ü\x00"]})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_parquet(batch(), tmp_path / "1.parquet")
    found = read_parquet(tmp_path / "1.parquet")
    assert found.columns().keys() == batch().columns().keys()
    for name, column in batch().batch.items():
        values, read = (c.values if isinstance(c, Ragged) else c for c in (column, found[name]))
        assert read.dtype == values.dtype
        assert torch.equal(read.nan_to_num(nan=9), values.nan_to_num(nan=9))
        if isinstance(column, Ragged):
            assert found[name].lengths.tolist() == [3, 0, 1]
    assert found["uid"].tolist() == ["a", "a", "ü\x00"]


def test_other_programs_see_a_list_for_each_row(tmp_path: Path) -> None:
    write_parquet(batch(), tmp_path / "1.parquet")
    assert pq.read_table(tmp_path / "1.parquet").column("responses").to_pylist() == [[5, 6, 2], [], [7]]


def test_columns_that_are_asked_for_and_there(tmp_path: Path) -> None:
    write_parquet(batch(), tmp_path / "1.parquet")
    assert list(read_parquet(tmp_path / "1.parquet", ["uid", "responses", "values"]).columns()) == ["responses", "uid"]


def test_a_batch_without_rows(tmp_path: Path) -> None:
    write_parquet(batch().slice(0, 0), tmp_path / "1.parquet")
    found = read_parquet(tmp_path / "1.parquet")
    assert len(found) == 0
    assert found["responses"].offsets.tolist() == [0]


@pytest.mark.parametrize("column", [Ragged(torch.ones(2, 3), torch.tensor([0, 2])), torch.ones(1, 2)])
def test_columns_of_other_kinds_are_refused(column: Ragged | torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="states"):
        write_parquet(DataProto.from_dict({"states": column}), tmp_path / "1.parquet")
