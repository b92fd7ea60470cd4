"""Shows texts on a terminal. Those of models, rows, files and code of others cannot send it escape sequences."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

# Control characters but newline and tab, line separators of Unicode, marks that turn the direction of the text that
# follows, and halves of surrogate pairs, which no stream can write.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def quiet_libraries() -> None:
    """Silence what libraries say of each other when they are imported. To be called before that."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def printable(text: str) -> str:
    """A text with `\ufffd` in the place of each control character."""
    return _CONTROL.sub("\ufffd", text)


def show(text: str, stream: TextIO | None = None) -> None:
    """Write a text to the standard output, or another stream, at once, as `as_shown` has it."""
    stream = sys.stdout if stream is None else stream
    stream.write(as_shown(text, stream))
    stream.flush()


def columns(cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def as_shown(text: str, stream: TextIO) -> str:
    """Return a text without control characters, and with `?` for what the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return printable(text).encode(encoding, "replace").decode(encoding)


def as_typed(program: str) -> str:
    """Return how a program of this environment is called here: by its name where PATH has it, else by its path."""
    own = Path(sys.executable).parent / program
    if shutil.which(program) is not None or not own.exists():
        return program
    return shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))


def json_line(row: Any) -> str:
    """A row as a line of JSON, with control characters as JSON's escapes, so that it can be shown and read back."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"
