"""Small disks: tmpfs of a few MiB. Needs Linux and root; a test that asks for one is skipped elsewhere."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1 << 20


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """A disk of so many MiB, empty, at a folder that is made, until the block ends."""
    if os.geteuid() != 0:
        pytest.skip("a small disk needs root")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk cannot be made here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def enlarge(folder: Path, mib: int) -> None:
    """Make a small disk one of so many MiB."""
    subprocess.run(["mount", "-o", f"remount,size={mib}m", str(folder)], check=True)
