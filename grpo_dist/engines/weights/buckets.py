"""Named tensors packed into flat byte buffers of bounded size, and back; each with its number and a checksum."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_dist.errors import WeightSyncError

# Tensors start at multiples of this many bytes, so that any dtype can be viewed in place.
ALIGNMENT = 64


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Some tensors as one (B,) uint8 array, and where each lies.

    Attributes:
        data: the bytes.
        entries: the tensors in them.
        number: position among the buckets of a model.
        last: whether no other one follows.
        checksum: CRC-32 of `data`.
    """

    data: np.ndarray
    entries: tuple[Entry, ...]
    number: int
    last: bool
    checksum: int


@dataclass(frozen=True)
class PackedTensors:
    """A bucket before it has a checksum: `data` is a (B,) uint8 tensor on any device; see `Bucket` for the rest."""

    data: Tensor
    entries: tuple[Entry, ...]
    number: int
    last: bool


def check_buckets(buckets: Sequence[Bucket]) -> None:
    """Check that a whole model arrived undamaged, before any of it is used.

    Raises:
        WeightSyncError: a bucket is missing, out of order, or damaged.
    """
    numbers = [bucket.number for bucket in buckets]
    complete = bool(buckets) and buckets[-1].last
    if numbers != list(range(len(buckets))) or not complete:
        last = "" if complete else "; the last one is missing"
        raise WeightSyncError(f"weight buckets {numbers} arrived instead of 0, 1, 2, ... in order{last}")
    for bucket in buckets:
        if fault := damage(bucket):
            raise WeightSyncError(fault)


def damage(bucket: Bucket) -> str:
    """What is wrong with the bytes of a bucket; "" if nothing is."""
    found = zlib.crc32(bucket.data.data)
    if found == bucket.checksum:
        return ""
    names = f"{bucket.entries[0].name} to {bucket.entries[-1].name}"
    return (
        f"weight bucket {bucket.number} ({names}) is damaged: checksum {found:#010x}, sent with {bucket.checksum:#010x}"
    )


def pack(tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[Bucket]:
    """`pack_tensors` on CPU, as arrays with a CRC-32."""
    for packed in pack_tensors(tensors, bucket_bytes=bucket_bytes):
        data = packed.data.numpy()
        yield Bucket(data, packed.entries, packed.number, packed.last, zlib.crc32(data.data))


def pack_tensors(tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[PackedTensors]:
    """Pack tensors, in order, into buckets of at most `bucket_bytes` (a larger tensor gets a bucket of its own).

    A bucket lies on the device of its tensors, and its bytes are a multiple of `ALIGNMENT`.
    """
    pending: list[tuple[Entry, Tensor]] = []
    used = number = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and used + num_bytes > bucket_bytes:
            yield _fill(pending, used, number, last=False)
            pending, used, number = [], 0, number + 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        pending.append((Entry(name, dtype, tuple(tensor.shape), used, num_bytes), tensor))
        used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    if pending:
        yield _fill(pending, used, number, last=True)


def unpack(data: np.ndarray | Tensor, entries: Iterable[Entry]) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of its memory: keep it alive and unchanged while they are in use."""
    with warnings.catch_warnings():  # buckets from the object store are read-only, and are only read
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = data if isinstance(data, Tensor) else torch.from_numpy(data)
    return [
        (e.name, flat[e.offset : e.offset + e.num_bytes].view(getattr(torch, e.dtype)).view(e.shape)) for e in entries
    ]


def _fill(pending: list[tuple[Entry, Tensor]], num_bytes: int, number: int, *, last: bool) -> PackedTensors:
    data = torch.empty(num_bytes, dtype=torch.uint8, device=pending[0][1].device)
    entries = tuple(entry for entry, _ in pending)
    for (entry, tensor), (_, target) in zip(pending, unpack(data, entries), strict=True):
        target.copy_(tensor)
        end = entry.offset + entry.num_bytes
        data[end : end + -end % ALIGNMENT] = 0  # the checksum covers the gaps
    return PackedTensors(data, entries, number, last)
