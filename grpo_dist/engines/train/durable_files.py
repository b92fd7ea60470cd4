"""Files that survive a crash: flushed to disk, and verified by size and digest. Loads neither torch nor Ray."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from grpo_dist.sizes import GIB


@dataclass(frozen=True)
class FileDigest:
    """Size and BLAKE2b digest (hex) of a file's contents."""

    num_bytes: int
    blake2b: str


def digest_file(path: Path) -> FileDigest:
    """Read a file and digest it."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32))
        return FileDigest(stream.tell(), digest.hexdigest())


def free_bytes(folder: Path) -> int:
    """Bytes that may be written into a folder, or into one that will be made in its place."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free


def require_room(folder: Path, num_bytes: float) -> None:
    """Check that so much may be written, before it is."""
    free = free_bytes(folder)
    if free < num_bytes:
        text = f"{num_bytes / GIB:.3g} GiB are needed, and {free / GIB:.3g} GiB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {text}")


def delete(path: Path) -> None:
    """Delete a folder, or a link or file in its place, if there is one; what a link leads to is another's and stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_durably(path: Path, text: str) -> None:
    """Write a text file and flush it to disk. Its name is durable once its folder is flushed too."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def publish_modes(folder: Path) -> None:
    """Give all files in a folder the mode of any new file, 0666 without the umask: some writers make private ones."""
    probe = folder / ".mode"
    probe.touch()  # asking for the umask would change it for a moment, for all threads
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def flush_path(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush all files and folders in a folder, and the folder itself."""
    for path in folder.rglob("*"):
        flush_path(path)
    flush_path(folder)
