"""DataProtoRef: the driver's handle to a batch whose columns are in Ray's object store.

A worker returns its columns once, with a label. They stay in the store and are owned by the driver, so they outlive the
worker (`Call.handle`). A consumer reads the rows and columns it needs with `fetch`. The driver only rearranges handles.
Besides references a handle carries the few small columns that the driver reads (one number or string per row), whose
size does not depend on the response length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import ray

from grpo_dist.errors import BatchError
from grpo_dist.protocol import DataProto
from grpo_dist.protocol.fields import columns_for, require


@dataclass(frozen=True)
class Frame:
    """Columns that were stored together: row i of the batch is row `row[i]` of the object `blocks[block[i]]`."""

    columns: tuple[str, ...]
    blocks: tuple[ray.ObjectRef, ...]
    block: np.ndarray
    row: np.ndarray

    def index(self, rows: np.ndarray) -> Frame:
        """These rows; references to blocks without any of them are dropped."""
        used, block = np.unique(self.block[rows], return_inverse=True)
        blocks = tuple(self.blocks[i] for i in used)
        return Frame(self.columns, blocks, block.reshape(-1), self.row[rows])

    def fetch(self, columns: Sequence[str]) -> DataProto:
        """Read the columns of all rows, block by block, and put the rows in order."""
        parts, origin = [], []
        for i, data in enumerate(ray.get(list(self.blocks))):
            positions = np.flatnonzero(self.block == i)
            parts.append(data.select(columns).index(self.row[positions]))
            origin.append(positions)
        return DataProto.concat(parts).reorder(np.argsort(np.concatenate(origin)))


@dataclass(frozen=True)
class Label:
    """The part of a stored batch that its handle knows: its columns, its small columns and its number of rows."""

    columns: tuple[str, ...]
    small: dict[str, np.ndarray]
    num_rows: int

    @classmethod
    def of(cls, data: DataProto) -> Label:
        """The label of `data`; its small columns are those that the driver reads."""
        small = {name: np.asarray(data[name]) for name in columns_for(data.columns(), "driver")}
        return cls(tuple(data.columns()), small, len(data))


@dataclass(frozen=True)
class DataProtoRef:
    """Handle to a batch of N rows."""

    frames: tuple[Frame, ...] = ()  # references to the stored columns
    small: dict[str, np.ndarray] = field(default_factory=dict)  # what the driver itself reads: (N,) numbers or strings
    num_rows: int = 0

    @classmethod
    def put(cls, data: DataProto) -> DataProtoRef:
        """Store `data` once."""
        return cls.stored(ray.put(data), Label.of(data))

    @classmethod
    def stored(cls, data: ray.ObjectRef, label: Label, first_row: int = 0) -> DataProtoRef:
        """Handle to a batch that is already in the object store, in the rows of an object from `first_row` on."""
        rows = label.num_rows
        frame = Frame(label.columns, (data,), np.zeros(rows, np.int64), np.arange(first_row, first_row + rows))
        return cls((frame,), label.small, rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the stored columns."""
        return tuple(name for frame in self.frames for name in frame.columns)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.small:
            raise BatchError(f"column {name!r} is not on the driver; it has {', '.join(sorted(self.small)) or 'none'}")
        return self.small[name]

    def select(self, columns: Iterable[str]) -> DataProtoRef:
        """Only these stored columns."""
        wanted = set(columns)
        require("select", self.columns, wanted)
        frames = (dataclasses.replace(f, columns=tuple(c for c in f.columns if c in wanted)) for f in self.frames)
        return dataclasses.replace(self, frames=tuple(f for f in frames if f.columns))

    def union(self, other: DataProtoRef) -> DataProtoRef:
        """The columns of both handles; rows correspond by position."""
        if len(self) != len(other):
            raise BatchError(f"union of handles with {len(self)} and {len(other)} rows")
        both = set(self.columns) & set(other.columns)
        if both:
            raise BatchError(f"union: both handles have a column {sorted(both)[0]!r}")
        return DataProtoRef(self.frames + other.frames, {**self.small, **other.small}, len(self))

    def replace(self, other: DataProtoRef) -> DataProtoRef:
        """The columns of both handles; `other` wins where both have one."""
        return self.select(set(self.columns) - set(other.columns)).union(other)

    def reorder(self, rows: Sequence[int] | np.ndarray) -> DataProtoRef:
        """These rows, in this order."""
        rows = np.asarray(rows, dtype=np.int64)
        frames = tuple(frame.index(rows) for frame in self.frames)
        return DataProtoRef(frames, {name: column[rows] for name, column in self.small.items()}, len(rows))

    def slice(self, start: int, stop: int) -> DataProtoRef:
        """Rows start..stop-1."""
        return self.reorder(np.arange(start, stop))

    def split(self, sizes: Sequence[int]) -> list[DataProtoRef]:
        """Consecutive parts of the given sizes."""
        ends = np.cumsum(sizes)
        return [self.slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    @classmethod
    def concat(cls, parts: Sequence[DataProtoRef]) -> DataProtoRef:
        """Rows of all parts, in order. A numeric small column that a part lacks is filled with nan."""
        groups = [frame.columns for frame in parts[0].frames]
        if any([frame.columns for frame in part.frames] != groups for part in parts):
            raise BatchError("concat: the handles' columns differ")
        frames = tuple(_concat_frames([part.frames[i] for part in parts]) for i in range(len(groups)))
        names = dict.fromkeys(name for part in parts for name in part.small)
        small = {name: np.concatenate([part._small_or_nan(name) for part in parts]) for name in names}
        return cls(frames, small, sum(len(part) for part in parts))

    def _small_or_nan(self, name: str) -> np.ndarray:
        return self.small[name] if name in self.small else np.full(len(self), np.nan, np.float32)

    def fetch(self, columns: Sequence[str]) -> DataProto:
        """Read columns from the object store, in the process that needs them. Blocks are memory-mapped, not copied."""
        require("fetch", self.columns, columns)
        data = DataProto()
        if not len(self):
            return data
        for frame in self.frames:
            if wanted := [name for name in frame.columns if name in columns]:
                part = frame.fetch(wanted)
                data = part if not data.columns() else data.union(part)
        return data


def _concat_frames(frames: Sequence[Frame]) -> Frame:
    number: dict[ray.ObjectRef, int] = {}  # several frames may be rows of the same block
    new = [np.array([number.setdefault(block, len(number)) for block in frame.blocks], np.int64) for frame in frames]
    block = np.concatenate([numbers[frame.block] for numbers, frame in zip(new, frames, strict=True)])
    return Frame(frames[0].columns, tuple(number), block, np.concatenate([frame.row for frame in frames]))
