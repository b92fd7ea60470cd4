"""A batch as a Parquet file: a row for each sequence, a list for each row of a ragged column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from grpo_dist.errors import BatchError
from grpo_dist.protocol.data_proto import DataProto
from grpo_dist.protocol.ragged import Ragged


def write_parquet(data: DataProto, path: Path) -> None:
    """Write a batch, compressed: columns of one number or text per row, and ragged ones of numbers that numpy has.

    Raises:
        BatchError: a column is of another kind.
        OSError: the file cannot be written.
    """
    arrays = {name: _array(name, column) for name, column in data.columns().items()}
    pq.write_table(pa.table(arrays), path, compression="zstd")


def read_parquet(path: Path, columns: list[str] | None = None) -> DataProto:
    """Read what `write_parquet` wrote: all columns, or those of `columns` that the file has.

    Raises:
        OSError: there is no such file, or it is damaged (pyarrow's ArrowInvalid is a ValueError).
    """
    with pq.ParquetFile(path) as file:
        names = [name for name in file.schema_arrow.names if columns is None or name in columns]
        table = file.read(columns=names).combine_chunks()
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for name in names:
        chunks = table.column(name)
        if pa.types.is_string(chunks.type):
            objects[name] = chunks.to_pylist()
        elif pa.types.is_large_list(chunks.type):
            array = pa.concat_arrays(chunks.chunks) if chunks.num_chunks else pa.array([], chunks.type)
            offsets = torch.from_numpy(np.array(array.offsets, dtype=np.int64))
            values = torch.from_numpy(np.array(array.values))[int(offsets[0]) : int(offsets[-1])]
            tensors[name] = Ragged(values, offsets - offsets[0])
        else:
            tensors[name] = torch.from_numpy(np.array(chunks.to_numpy()))
    return DataProto.from_dict(tensors, objects)


def _array(name: str, column: Any) -> pa.Array:
    if isinstance(column, Ragged) and column.values.ndim == 1:
        return pa.LargeListArray.from_arrays(column.offsets.numpy(), pa.array(column.values.numpy()))
    if isinstance(column, torch.Tensor) and column.ndim == 1:
        return pa.array(column.numpy())
    if isinstance(column, np.ndarray) and all(isinstance(value, str) for value in column):
        return pa.array(column.tolist(), pa.string())
    raise BatchError(f"column {name!r} is neither numbers or texts, one per row, nor lists of numbers")
