"""Weight buckets as what has changed in them since the last sync.

After an update with a small learning rate most weights in bfloat16 have the same bits as before: the change is less
than their rounding. A `Difference` has the words that are others, and where they are; a bucket of which too much has
changed travels whole. The sender keeps the buckets of its last sync, the receiver those that it holds, and changes them
in place. A difference says the checksum of the whole bucket that it leads to, so that one that was damaged, or meets
other weights than it was made from, is found before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from grpo_dist.engines.weights.buckets import Bucket, Header, check_buckets
from grpo_dist.errors import WeightSyncError

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
    """The sender's side: what receivers hold if they have taken in the last sync.

    Attributes:
        share: bytes of the last sync by those of the whole weights; nan before the first.
    """

    def __init__(self) -> None:
        self._buckets: list[Bucket] = []
        self.share = float("nan")

    def changes(self, buckets: Iterable[Bucket], *, whole: bool = False) -> Iterator[Bucket | Difference]:
        """Yield each bucket of a sync, or its difference from the last one's.

        Args:
            whole: leave all buckets as they are, for receivers that lack the last sync.
        """
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
    """The receiver's side.

    Args:
        keeps: hold the buckets of the last sync, for differences from them.
    """

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
