"""Weight buckets as files in shared memory, in which an engine passes them to its workers, one at a time.

The folder of a load is removed at its end. A killed process leaves its folder behind, and so a bucket in the node's
memory; the next engine that starts on the node removes it. So it does with the shared memory segments through which the
processes of an engine communicate: a file in such a folder lists their names.
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
    """Write one bucket after the other into a file; the file before is removed first.

    Yields:
        What `read_bucket` takes. Close the generator if you do not use it up.
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
    """The bucket in a file, mapped, not copied: its memory is freed with the last reference. Nothing is checked."""
    data = torch.from_file(file["path"], shared=True, size=file["num_bytes"], dtype=torch.uint8).numpy()
    entries = tuple(Entry(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in file["entries"])
    return Bucket(data, entries, file["number"], file["last"], file["checksum"])


def new_folder() -> Path:
    """A folder in shared memory. `remove` it; if this process is killed, the next engine does."""
    return Path(tempfile.mkdtemp(prefix=_own_prefix(), dir=shared_memory()))


def note_segments(names: Iterable[str]) -> Path:
    """List shared memory segments in a new folder: whoever removes the folder also removes them.

    Returns:
        The folder, for `remove`.
    """
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
    for folder in shared_memory().glob(f"{PREFIX}-{_pid_namespace()}-*"):
        pid = folder.name.removeprefix(f"{PREFIX}-{_pid_namespace()}-").partition("-")[0]
        with contextlib.suppress(OSError):  # another engine clears too
            if pid.isdecimal() and folder.stat().st_uid == os.getuid() and not is_alive(int(pid)):
                remove(folder)


def _own_prefix() -> str:
    return f"{PREFIX}-{_pid_namespace()}-{os.getpid()}-"


def is_alive(pid: int) -> bool:
    """Whether a process is alive and holds its memory; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error as error:
        return not isinstance(error, psutil.NoSuchProcess)


def _pid_namespace() -> int:
    """Containers may share the memory but not the process ids: processes of another container must not seem dead."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def shared_memory() -> Path:
    """Where the node has its shared memory."""
    return Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
