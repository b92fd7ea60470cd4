"""Weight buckets as files in shared memory, through which an engine hands them to its workers: one at a time.

The folder of a load is removed at its end. A process that is killed leaves its folder behind, and with it a bucket in
the node's memory; the next engine that starts on the node clears it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from grpo_dist.engines.weight_buckets import Bucket

PREFIX = "grpo_dist-weights"


def bucket_files(buckets: Sequence[Bucket]) -> Generator[dict[str, Any], None, None]:
    """Write one bucket after the other into a file, and say where; the one before is removed first.

    Yields:
        The fields of vllm_weight_backend.SharedMemoryUpdateInfo. Close the generator where it is not used up.
    """
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}-{_pid_namespace()}-{os.getpid()}-", dir=_folder()) as folder:
        for bucket in buckets:
            path = Path(folder) / uuid.uuid4().hex
            bucket.data.tofile(path)
            entries = [[e.name, e.dtype, list(e.shape), e.offset, e.num_bytes] for e in bucket.entries]
            yield {"path": str(path), "num_bytes": len(bucket.data), "entries": entries}
            path.unlink()


def clear_left_behind() -> None:
    """Remove what processes of this user that are dead by now have left."""
    for folder in _folder().glob(f"{PREFIX}-{_pid_namespace()}-*"):
        pid = folder.name.removeprefix(f"{PREFIX}-{_pid_namespace()}-").partition("-")[0]
        with contextlib.suppress(OSError):  # another engine clears too
            if pid.isdecimal() and folder.stat().st_uid == os.getuid() and not _lives(int(pid)):
                shutil.rmtree(folder)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _pid_namespace() -> int:
    """Containers may share the memory and not the process ids: another one's process must not look dead."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _folder() -> Path:
    return Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
