"""Weight buckets as files in shared memory, through which an engine hands them to its workers: one at a time.

The folder of a load is removed at its end. A process that is killed leaves its folder behind, and with it a bucket in
the node's memory; the next engine that starts on the node clears it. The same goes for the segments through which the
processes of an engine talk to each other: their names are noted in such a folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from grpo_dist.engines.weights.buckets import Bucket, Entry

PREFIX = "grpo_dist-weights"
SEGMENTS = "segments"  # the file with the names


def bucket_files(buckets: Sequence[Bucket]) -> Generator[dict[str, Any], None, None]:
    """Write one bucket after the other into a file, and say where; the one before is removed first.

    Yields:
        The fields of vllm.weight_backend.SharedMemoryUpdateInfo; `read_bucket` takes them. Close the generator where it
        is not used up.
    """
    with tempfile.TemporaryDirectory(prefix=_own_prefix(), dir=shared_memory()) as folder:
        for bucket in buckets:
            path = Path(folder) / uuid.uuid4().hex
            bucket.data.tofile(path)
            yield {
                "path": str(path),
                "num_bytes": len(bucket.data),
                "entries": [[e.name, e.dtype, list(e.shape), e.offset, e.num_bytes] for e in bucket.entries],
                "number": bucket.number,
                "last": bucket.last,
                "checksum": bucket.checksum,
            }
            path.unlink()


def read_bucket(file: Mapping[str, Any]) -> Bucket:
    """The bucket in a file, mapped: the memory stays as long as something looks at it. Nothing is checked."""
    data = torch.from_file(file["path"], shared=True, size=file["num_bytes"], dtype=torch.uint8).numpy()
    entries = tuple(Entry(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in file["entries"])
    return Bucket(data, entries, file["number"], file["last"], file["checksum"])


def new_folder() -> Path:
    """A folder in shared memory of this process, for `remove`; should it be killed, the next engine clears it."""
    return Path(tempfile.mkdtemp(prefix=_own_prefix(), dir=shared_memory()))


def note_segments(names: Iterable[str]) -> Path:
    """Note which segments of shared memory go with this process, should it be killed.

    Returns:
        The folder with the note, for `remove`.
    """
    folder = new_folder()
    (folder / SEGMENTS).write_text("\n".join(names))
    return folder


def remove(folder: Path) -> None:
    """Remove a folder of this module's, and the segments that are noted there."""
    note = folder / SEGMENTS
    for name in note.read_text().splitlines() if note.exists() else ():
        (shared_memory() / Path(name).name).unlink(missing_ok=True)
    shutil.rmtree(folder)


def clear_left_behind() -> None:
    """Remove what processes of this user that are dead by now have left."""
    for folder in shared_memory().glob(f"{PREFIX}-{_pid_namespace()}-*"):
        pid = folder.name.removeprefix(f"{PREFIX}-{_pid_namespace()}-").partition("-")[0]
        with contextlib.suppress(OSError):  # another engine clears too
            if pid.isdecimal() and folder.stat().st_uid == os.getuid() and not lives(int(pid)):
                remove(folder)


def _own_prefix() -> str:
    return f"{PREFIX}-{_pid_namespace()}-{os.getpid()}-"


def lives(pid: int) -> bool:
    """Whether it holds its memory: one that has ended and that nobody takes note of does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error as error:
        return not isinstance(error, psutil.NoSuchProcess)


def _pid_namespace() -> int:
    """Containers may share the memory and not the process ids: another one's process must not look dead."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def shared_memory() -> Path:
    """Where the node has its shared memory."""
    return Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
