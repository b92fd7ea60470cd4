"""Looking at paths that a user wrote. These functions never raise: a path that cannot be looked at is not there."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str) -> Path:
    """The path with ~ in place of a home folder, where there is that user."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises for a user that is not there


def is_folder(path: str | Path) -> bool:
    """Whether there is a folder. Path.is_dir raises for names that are too long and folders that may not be entered."""
    return os.path.isdir(expanded(str(path)))


def is_file(path: str | Path) -> bool:
    """Whether there is a file."""
    return os.path.isfile(expanded(str(path)))
