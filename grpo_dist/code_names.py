"""How configs name a function or a class: `pkg.module:name` or `path/to/file.py:name`. Nothing is imported here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class CodeName(NamedTuple):
    """Where a function or class is: a module or a .py file, and the name in it; "" where none is given."""

    source: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.source}:{self.attribute}" if self.attribute else self.source


def parse_code(text: str, attribute: str = "") -> CodeName:
    """Parse `pkg.module:name` or `path/to/file.py:name`, also with verl's `pkg://` or `file://` before it.

    Args:
        text: what the config says.
        attribute: the name where the text has none.
    """
    plain = text.removeprefix("file://").removeprefix("pkg://")
    source, _, name = plain.rpartition(":")
    if not source or not name.isidentifier():
        source, name = plain, attribute
    return CodeName(os.path.expanduser(source) if source.endswith(".py") else source, name)


def absolute(spec: str) -> str:
    """Make the path in `path/to/file.py:attr` absolute, because workers run in other folders; others are unchanged."""
    code = parse_code(spec)
    return str(code._replace(source=str(Path(code.source).absolute())) if code.source.endswith(".py") else code)
