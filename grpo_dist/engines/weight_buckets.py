"""Named tensors packed into flat byte buffers of bounded size, and back."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
    """Some tensors as one (B,) uint8 array, and where each lies."""

    data: np.ndarray
    entries: tuple[Entry, ...]


def pack(tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[Bucket]:
    """Pack tensors, in order, into buckets of at most `bucket_bytes` (a larger tensor gets a bucket of its own)."""
    pending: list[tuple[Entry, Tensor]] = []
    used = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and used + num_bytes > bucket_bytes:
            yield _fill(pending, used)
            pending, used = [], 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        pending.append((Entry(name, dtype, tuple(tensor.shape), used, num_bytes), tensor))
        used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    if pending:
        yield _fill(pending, used)


def unpack(data: np.ndarray | Tensor, entries: Iterable[Entry]) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of its memory: keep it alive and unchanged while they are in use."""
    with warnings.catch_warnings():  # buckets from the object store are read-only, and are only read
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = data if isinstance(data, Tensor) else torch.from_numpy(data)
    return [
        (e.name, flat[e.offset : e.offset + e.num_bytes].view(getattr(torch, e.dtype)).view(e.shape)) for e in entries
    ]


def _fill(pending: list[tuple[Entry, Tensor]], num_bytes: int) -> Bucket:
    data = torch.empty(num_bytes, dtype=torch.uint8)
    entries = tuple(entry for entry, _ in pending)
    for (_, tensor), (_, target) in zip(pending, unpack(data, entries), strict=True):
        target.copy_(tensor)
    return Bucket(data.numpy(), entries)
