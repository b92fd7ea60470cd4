"""Named tensors packed into flat byte buffers of bounded size, each with its number and a checksum; and what has
changed in them since the last sync.

An engine passes buckets to its workers as files in the node's shared memory, one at a time. The folder of a load is
removed at its end. A killed process leaves its folder behind, and so a bucket in the node's memory; the next engine
that starts on the node removes it. So it does with the shared memory segments through which the processes of an engine
communicate: a file in such a folder lists their names.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from grpo_dist.errors import WeightSyncError
from grpo_dist.supervisor import left_behind, own_prefix

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
class Header:
    """What is said of a bucket ahead of its bytes, of which `position_checksum` (broadcast.py) or CRC-32 is sent too.

    Attributes:
        number: position among the buckets of a model.
        last: whether no other one follows.
    """

    entries: tuple[Entry, ...]
    number: int
    last: bool
    num_bytes: int
    checksum: int

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Make one of its fields by name, with those of each entry by name, as JSON has them."""
        entries = tuple(Entry(**entry | {"shape": tuple(entry["shape"])}) for entry in content["entries"])
        return cls(**{**content, "entries": entries})


@dataclass(frozen=True)
class Bucket(Header):
    """Some tensors as one (B,) uint8 array, and its CRC-32."""

    data: np.ndarray


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
        if fault := damage(bucket, crc32(bucket)):
            raise WeightSyncError(fault)


def crc32(bucket: Bucket) -> int:
    """Return the checksum of a bucket's bytes as they are."""
    return zlib.crc32(bucket.data.data)


def damage(header: Header, computed: int) -> str:
    """Return what is wrong with a bucket, by the checksum of the bytes that have come; "" if nothing is."""
    if computed == header.checksum:
        return ""
    names = f"{header.entries[0].name} to {header.entries[-1].name}"
    sums = [f"{number % 2**64:#x}" for number in (computed, header.checksum)]
    return f"weight bucket {header.number} ({names}) is damaged: checksum {sums[0]}, sent with {sums[1]}"


def pack(tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[Bucket]:
    """`pack_tensors` on CPU, as arrays with a CRC-32."""
    packed = pack_tensors(tensors, bucket_bytes=bucket_bytes, checksum=lambda data: zlib.crc32(data.numpy().data))
    for data, header in packed:
        yield Bucket(**vars(header), data=data.numpy())


def pack_tensors(
    tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int, checksum: Callable[[Tensor], int]
) -> Iterator[tuple[Tensor, Header]]:
    """Pack tensors, in order, into buckets of at most `bucket_bytes` (a larger tensor gets a bucket of its own).

    A bucket lies on the device of its tensors, and its bytes are a multiple of `ALIGNMENT`.
    """
    pending: list[tuple[Entry, Tensor]] = []
    used = number = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and used + num_bytes > bucket_bytes:
            yield _fill(pending, used, number, checksum, last=False)
            pending, used, number = [], 0, number + 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        pending.append((Entry(name, dtype, tuple(tensor.shape), used, num_bytes), tensor))
        used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    if pending:
        yield _fill(pending, used, number, checksum, last=True)


def unpack(data: np.ndarray | Tensor, entries: Iterable[Entry]) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of its memory: keep it alive and unchanged while they are in use."""
    with warnings.catch_warnings():  # buckets from the object store are read-only, and are only read
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = data if isinstance(data, Tensor) else torch.from_numpy(data)
    return [
        (e.name, flat[e.offset : e.offset + e.num_bytes].view(getattr(torch, e.dtype)).view(e.shape)) for e in entries
    ]


def _fill(
    pending: list[tuple[Entry, Tensor]], num_bytes: int, number: int, checksum: Callable[[Tensor], int], *, last: bool
) -> tuple[Tensor, Header]:
    data = torch.empty(num_bytes, dtype=torch.uint8, device=pending[0][1].device)
    entries = tuple(entry for entry, _ in pending)
    for (entry, tensor), (_, target) in zip(pending, unpack(data, entries), strict=True):
        target.copy_(tensor)
        end = entry.offset + entry.num_bytes
        data[end : end + -end % ALIGNMENT] = 0  # the checksum covers the gaps
    return data, Header(entries, number, last, num_bytes, checksum(data))


PREFIX = "grpo_dist-weights"
SEGMENTS = "segments"  # the file with the names


def bucket_files(buckets: Sequence[Bucket]) -> Generator[dict[str, Any], None, None]:
    """Write one bucket after the other into a file, what `read_bucket` takes; the file before is removed first.

    Close the generator if you do not use it up.
    """
    with tempfile.TemporaryDirectory(prefix=own_prefix(PREFIX), dir=shared_memory()) as folder:
        for bucket in buckets:
            path = Path(folder) / uuid.uuid4().hex
            bucket.data.tofile(path)
            yield vars(bucket) | {"data": str(path), "entries": [asdict(entry) for entry in bucket.entries]}
            path.unlink()


def read_bucket(file: Mapping[str, Any]) -> Bucket:
    """The bucket in a file, mapped, not copied: its memory is freed with the last reference. Nothing is checked."""
    data = torch.from_file(file["data"], shared=True, size=file["num_bytes"], dtype=torch.uint8).numpy()
    return Bucket.read({**file, "data": data})


def new_folder() -> Path:
    """A folder in shared memory. `remove` it; if this process is killed, the next engine does."""
    return Path(tempfile.mkdtemp(prefix=own_prefix(PREFIX), dir=shared_memory()))


def note_segments(names: Iterable[str]) -> Path:
    """List shared memory segments in a new folder, which is returned: whoever removes it also removes them."""
    folder = new_folder()
    (folder / SEGMENTS).write_text("\n".join(names))
    return folder


def remove(folder: Path) -> None:
    """Remove a folder of this module, and the segments that it lists."""
    note = folder / SEGMENTS
    for name in note.read_text().splitlines() if note.exists() else ():
        (shared_memory() / Path(name).name).unlink(missing_ok=True)
    shutil.rmtree(folder)


def clear_left_behind() -> None:
    """Remove the folders of dead processes of this user."""
    for folder in left_behind(PREFIX, shared_memory()):
        with contextlib.suppress(OSError):  # another engine clears too
            remove(folder)


def shared_memory() -> Path:
    """Where the node has its shared memory."""
    return Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())


# --- differences ------------------------------------------------------------------------------------------------------
# After an update with a small learning rate most weights in bfloat16 have the same bits as before: the change is less
# than their rounding. A `Difference` has the words that are others, and where they are; a bucket of which too much
# has changed travels whole. The sender keeps the buckets of its last sync, the receiver those that it holds, and
# changes them in place. A difference says the checksum of the whole bucket that it leads to, so that one that was
# damaged, or meets other weights than it was made from, is found before anything is loaded.

# Weights are compared in words of the size of bfloat16; those in float32 have two.
WORD = np.uint16
# Bytes that a changed word takes: itself, and its place.
CHANGE_BYTES = 2 + 4


@dataclass(frozen=True)
class Difference(Header):
    """What has changed in a bucket; its header is that of the whole bucket as it is now.

    Attributes:
        places: (C,) uint32, of the words that have changed.
        words: (C,) what they are now.
    """

    places: np.ndarray
    words: np.ndarray


class Sent:
    """The sender's side: what receivers hold after the last sync, and its `share` of the whole bytes, nan at first."""

    def __init__(self) -> None:
        self._buckets: list[Bucket] = []
        self.share = float("nan")

    def changes(self, buckets: Iterable[Bucket], *, whole: bool = False) -> Iterator[Bucket | Difference]:
        """Yield each bucket of a sync, or its difference from the last one's unless receivers lack that (`whole`)."""
        before, self._buckets, sent, total = self._buckets, [], 0, 0
        for bucket in buckets:
            old = before.pop(0) if before else None
            change = None if whole or old is None else difference(old, bucket)
            self._buckets.append(bucket)
            del old  # its memory is free
            sent += bucket.num_bytes if change is None else len(change.words) * CHANGE_BYTES
            total += bucket.num_bytes
            yield change or bucket
        self.share = sent / total if total else float("nan")


class Held:
    """The receiver's side; it `keeps` the buckets of the last sync, for differences from them."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._buckets: list[Bucket] = []

    def take(self, arrived: Sequence[Bucket | Difference]) -> list[Bucket]:
        """Return the whole buckets of a sync, all of which have been checked.

        Raises:
            WeightSyncError: some are damaged, missing, or differ from others than those held; nothing is held then, and
                the next sync must be whole.
        """
        held, self._buckets = self._buckets, []
        buckets = []
        for number, part in enumerate(arrived):
            if isinstance(part, Difference):
                if number >= len(held) or held[number].num_bytes != part.num_bytes:
                    raise WeightSyncError(f"weight bucket {number} came as a difference from one that is not held here")
                part = _changed(held[number], part)
            buckets.append(part)
        check_buckets(buckets)
        self._buckets = buckets if self._keeps else []
        return buckets


def difference(before: Bucket, now: Bucket) -> Difference | None:
    """Return what has changed in a bucket; None where the whole one is no longer than that."""
    if before.entries != now.entries:
        return None
    words = now.data.view(WORD)
    places = np.flatnonzero(words != before.data.view(WORD))
    if len(places) * CHANGE_BYTES >= now.num_bytes:
        return None
    return Difference(**_header(now), places=places.astype(np.uint32), words=words[places])


def _header(part: Header) -> dict[str, Any]:
    return {field.name: getattr(part, field.name) for field in fields(Header)}


def _changed(bucket: Bucket, change: Difference) -> Bucket:
    """The bucket with the change made in its memory; one that came through the object store is copied first."""
    data = bucket.data if bucket.data.flags.writeable else bucket.data.copy()
    if len(change.places) and change.places.max() >= len(data.view(WORD)):
        raise WeightSyncError(f"weight bucket {change.number} is damaged: a change lies outside of it")
    data.view(WORD)[change.places] = change.words
    return Bucket(**_header(change), data=data)
