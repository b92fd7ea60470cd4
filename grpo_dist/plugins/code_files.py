"""Files of Python code that the config names, as modules.

A module's name is this one's and the file's path. So files of one name stay apart, and what pickle names in such a file
any process finds that can import this package: a pool that a reward function starts, by fork, spawn or forkserver.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote, unquote

__path__: list[str] = []  # what a package has: there may be modules below it


def load_file(path: Path) -> ModuleType:
    """The module of a file. It is executed once, and again when its text has changed."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path} (looked in {Path.cwd()})")
    module = _executed(_name(path.absolute()), path.read_bytes())
    sys.modules[module.__name__] = module
    return module


@cache
def _executed(name: str, text: bytes) -> ModuleType:
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def _name(path: Path) -> str:
    return f"{__name__}.{quote(str(path), safe='', errors='surrogateescape').replace('.', '%2E')}"


def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
    """Find such a module by its name, as a finder of `sys.meta_path` does."""
    file = Path(unquote(name.removeprefix(f"{__name__}."), errors="surrogateescape"))
    known = name == _name(file) and file.is_absolute() and file.is_file()
    return importlib.util.spec_from_file_location(name, file) if known else None


finder: Any = sys.modules[__name__]
sys.meta_path.append(finder)
