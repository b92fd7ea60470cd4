"""Checks of paths that a user wrote. They never raise: a path that cannot be accessed counts as missing."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str) -> Path:
    """The path with `~` replaced by the home folder; unchanged if there is no such user."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user


def is_folder(path: str | Path) -> bool:
    """Whether the folder exists. Path.is_dir would raise for names that are too long, or without permission."""
    return os.path.isdir(expanded(str(path)))


def is_file(path: str | Path) -> bool:
    """Whether the file exists."""
    return os.path.isfile(expanded(str(path)))
