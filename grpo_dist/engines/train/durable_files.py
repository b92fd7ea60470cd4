"""Files that survive a crash: flushed to disk, and verified by size and digest. Loads neither torch nor Ray."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileDigest:
    """Size and BLAKE2b digest (hex) of a file's contents."""

    num_bytes: int
    blake2b: str


def digest_file(path: Path) -> FileDigest:
    """Read a file and digest it.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32))
        return FileDigest(stream.tell(), digest.hexdigest())


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
