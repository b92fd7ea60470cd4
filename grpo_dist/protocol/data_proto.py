"""DataProto: the batch that travels between workers.

All columns share one batch axis. There are three kinds: dense tensors (N, ...), ragged tensors (`Ragged`) and object
columns (numpy object arrays). The method names are verl's. Methods return a new object and change nothing in place,
because a batch from the object store is shared, read-only memory. Buffers are pickled out of band, so Ray stores and
memory-maps them without a copy.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_dist.errors import BatchError
from grpo_dist.protocol.fields import made_by
from grpo_dist.protocol.media import MEDIA, packed, unpacked
from grpo_dist.protocol.ragged import Ragged

TensorColumn = Tensor | Ragged
Rows = np.ndarray | Tensor | Sequence[int] | slice


@dataclass(frozen=True)
class DataProto:
    """A batch of N rows: tensor columns, dense (N, ...) or ragged, and object columns, numpy object arrays (N,)."""

    batch: dict[str, TensorColumn] = field(default_factory=dict)
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        clash = self.batch.keys() & self.non_tensor_batch.keys()
        if clash:
            raise BatchError(f"column {sorted(clash)[0]!r} is both a tensor and an object column")
        sizes = {name: len(column) for name, column in self.columns().items()}
        if len(set(sizes.values())) > 1:
            raise BatchError(f"columns disagree on the number of rows: {sizes}")

    @classmethod
    def from_dict(cls, tensors: Mapping[str, TensorColumn], non_tensors: Mapping[str, Any] | None = None) -> DataProto:
        """Build from plain dicts; an object column may be any sequence."""
        return cls(dict(tensors), {name: object_array(column) for name, column in (non_tensors or {}).items()})

    def columns(self) -> dict[str, Any]:
        """All columns by name."""
        return {**self.batch, **self.non_tensor_batch}

    def __len__(self) -> int:
        return next((len(column) for column in self.columns().values()), 0)

    def __getitem__(self, name: str) -> Any:
        columns = self.columns()
        if name not in columns:
            there = ", ".join(sorted(columns)) or "none"
            raise BatchError(f"the batch has no column {made_by([name])}; it has {there}")
        return columns[name]

    # --- columns -----------------------------------------------------------------------------------------------
    def select(self, names: Sequence[str]) -> DataProto:
        """Only these columns."""
        for name in names:
            self[name]
        return DataProto(
            {k: v for k, v in self.batch.items() if k in names},
            {k: v for k, v in self.non_tensor_batch.items() if k in names},
        )

    def pop(self, names: Sequence[str]) -> tuple[DataProto, DataProto]:
        """(these columns, the rest)."""
        return self.select(names), self.select([k for k in self.columns() if k not in names])

    def union(self, other: DataProto) -> DataProto:
        """The columns of both batches."""
        for name in self.columns().keys() & other.columns().keys():
            if not _same(self[name], other[name]):
                raise BatchError(f"union: both batches have a column {name!r}, with different values")
        return DataProto(self.batch | other.batch, self.non_tensor_batch | other.non_tensor_batch)

    # --- rows --------------------------------------------------------------------------------------------------
    def index(self, rows: Rows) -> DataProto:
        """These rows, in this order; a row may be taken more than once."""
        picked = rows if isinstance(rows, slice) else np.asarray(rows)
        if not isinstance(picked, slice) and picked.size == 0:
            picked = picked.astype(np.int64)  # an empty list has no type of its own
        tensor_rows = picked if isinstance(picked, slice) else torch.as_tensor(picked)
        return DataProto(
            {k: v[tensor_rows] for k, v in self.batch.items()},
            {k: v[picked] for k, v in self.non_tensor_batch.items()},
        )

    reorder = index

    def slice(self, start: int, stop: int) -> DataProto:
        """Rows start..stop-1."""
        return self.index(slice(start, stop))

    @classmethod
    def concat(cls, parts: Sequence[DataProto]) -> DataProto:
        """Rows of all parts, in order."""
        if not parts:
            return cls()
        names = parts[0].columns().keys()
        for part in parts:
            if part.columns().keys() != names:
                raise BatchError(
                    f"concat: columns differ: {sorted(part.columns().keys() ^ names)} are not in every part"
                )
        tensors: dict[str, Any] = {k: [p.batch[k] for p in parts] for k in parts[0].batch}
        return cls(
            {k: Ragged.concat(v) if isinstance(v[0], Ragged) else torch.cat(v) for k, v in tensors.items()},
            {k: np.concatenate([p.non_tensor_batch[k] for p in parts]) for k in parts[0].non_tensor_batch},
        )

    # --- wire and disk -----------------------------------------------------------------------------------------
    def __getstate__(self) -> dict[str, Any]:
        tensors = {k: tuple(_to_array(t) for t in _parts(v)) for k, v in self.batch.items()}
        bf16 = [k for k, v in self.batch.items() if _parts(v)[0].dtype == torch.bfloat16]
        return {"tensors": tensors, "bf16": bf16, "objects": self.non_tensor_batch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        parts = {k: [_from_shared(a) for a in arrays] for k, arrays in state["tensors"].items()}
        for name in state["bf16"]:
            parts[name][0] = parts[name][0].view(torch.bfloat16)
        batch = {k: _column(v) for k, v in parts.items()}
        object.__setattr__(self, "batch", batch)
        object.__setattr__(self, "non_tensor_batch", state["objects"])

    def save(self, path: str | Path) -> None:
        """Write `path`.safetensors (tensors) and `path`.json (object columns, which must be JSON-serializable)."""
        # clones: columns may share memory (per-token columns share offsets), which safetensors refuses
        parts = {
            f"{k}.{i}": t.clone(memory_format=torch.contiguous_format)
            for k, v in self.batch.items()
            for i, t in enumerate(_parts(v))
        }
        objects = {k: v.tolist() for k, v in self.non_tensor_batch.items()}
        if MEDIA in objects:
            objects[MEDIA], arrays = packed(objects[MEDIA])
            parts |= {f"{MEDIA}/{key}.0": torch.tensor(array) for key, array in arrays.items()}
        save_file(parts, f"{path}.safetensors")
        Path(f"{path}.json").write_text(json.dumps(objects))

    @classmethod
    def load(cls, path: str | Path) -> DataProto:
        """Read what `save` wrote."""
        columns: dict[str, list[Tensor]] = {}
        for key, tensor in sorted(load_file(f"{path}.safetensors").items()):
            columns.setdefault(key.rpartition(".")[0], []).append(tensor)
        objects = json.loads(Path(f"{path}.json").read_text())
        if MEDIA in objects:
            named = [name for name in columns if name.startswith(f"{MEDIA}/")]
            arrays = {name.removeprefix(f"{MEDIA}/"): columns.pop(name)[0].numpy() for name in named}
            objects[MEDIA] = unpacked(objects[MEDIA], arrays)
        return cls.from_dict({k: _column(v) for k, v in columns.items()}, objects)


def object_array(values: Any) -> np.ndarray:
    """Convert a sequence to an (N,) object array without converting its entries."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def _parts(column: TensorColumn) -> tuple[Tensor, ...]:
    return (column.values, column.offsets) if isinstance(column, Ragged) else (column,)


def _column(parts: Sequence[Tensor]) -> TensorColumn:
    return Ragged(parts[0], parts[1]) if len(parts) == 2 else parts[0]


def _to_array(tensor: Tensor) -> np.ndarray:
    """The tensor as an array that shares its memory; bfloat16, which numpy lacks, is viewed as int16."""
    return tensor.contiguous().view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _from_shared(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():  # the memory is read-only on purpose
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _same(a: Any, b: Any) -> bool:
    """Tell if two values are equal, with whatever they hold; nan is nan."""
    if isinstance(a, Ragged) and isinstance(b, Ragged):
        return all(map(_same, _parts(a), _parts(b)))
    if isinstance(a, Tensor | np.ndarray) and type(a) is type(b) and object not in (a.dtype, b.dtype):
        alike = a.shape == b.shape and (a.dtype == b.dtype or isinstance(a, np.ndarray))
        return alike and bool(((a == b) | ((a != a) & (b != b))).all())  # type: ignore[union-attr]
    a, b = (value.tolist() if isinstance(value, np.ndarray | Tensor) else value for value in (a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or bool(a == b or (a != a and b != b))
