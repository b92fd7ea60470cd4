"""The lines that custom code prints: the first ones are kept to be shown, the others are counted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from grpo_dist.errors import GrpoDistError

MOST_LINES = 5
MOST_LINE_BYTES = 500
MOST_PRINTED = 10  # lines of one kind of custom code that are shown per step


class OutputLines:
    """Splits output into lines and keeps the first of them; lines are cut to `MOST_LINE_BYTES`.

    Args:
        most_lines: the number of lines that are kept between two calls of `take`.
    """

    def __init__(self, most_lines: int = MOST_LINES) -> None:
        self._most_lines = most_lines
        self._lines: list[str] = []
        self._num_more = 0
        self._rest = b""

    def add(self, block: bytes) -> None:
        """Add output, in pieces of any length."""
        first, *others = block.split(b"\n", 1)
        self._rest += first[: MOST_LINE_BYTES - len(self._rest)]
        while others:
            self._end_line()
            if len(self._lines) >= self._most_lines:
                self._num_more += others[0].count(b"\n")
                self._rest = others[0].rpartition(b"\n")[2][:MOST_LINE_BYTES]
                return
            first, *others = others[0].split(b"\n", 1)
            self._rest = first[:MOST_LINE_BYTES]

    def take(self) -> tuple[list[str], int]:
        """Return the first lines since the last call, and the number of further lines."""
        if self._rest:
            self._end_line()
        taken = self._lines, self._num_more
        self._lines, self._num_more = [], 0
        return taken

    def _end_line(self) -> None:
        if len(self._lines) < self._most_lines:
            self._lines.append(self._rest.decode(errors="replace").rstrip())
        else:
            self._num_more += 1
        self._rest = b""


_LINES: ContextVar[OutputLines | None] = ContextVar("printed lines", default=None)


@contextlib.contextmanager
def printing_to(lines: OutputLines) -> Iterator[None]:
    """Add to `lines` what the block prints, and the tasks and threads that asyncio starts in it; it is printed too.

    An error of the package that ends the block gets the lines as notes, as nobody will take them.
    """
    if not isinstance(sys.stdout, _Copied):
        sys.stdout = _Copied(sys.stdout)
    token = _LINES.set(lines)
    try:
        yield
    except GrpoDistError as error:
        for line in lines.take()[0]:
            error.add_note(f"printed before: {line}")
        raise
    finally:
        _LINES.reset(token)


class _Copied:
    """A stream that also adds what is written to it to the lines of the block that writes (`printing_to`)."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> Any:
        if (lines := _LINES.get()) is not None:
            lines.add(text.encode(errors="replace"))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PrintedLines:
    """The lines that all processes of a run have printed, by kind of custom code: the first ones, and how many more."""

    def __init__(self) -> None:
        self._printed: dict[str, tuple[list[str], int]] = {}

    def note(self, kind: str, lines: Sequence[str], num_more: int) -> None:
        """Add lines; `num_more` lines were left out by the process itself."""
        kept, more = self._printed.get(kind, ([], 0))
        room = MOST_PRINTED - len(kept)
        self._printed[kind] = [*kept, *lines[:room]], more + num_more + len(lines[room:])

    def take(self) -> list[str]:
        """Return a message for each kind that has printed something since the last call."""
        printed, self._printed = self._printed, {}
        messages = []
        for kind, (lines, more) in printed.items():
            if lines:
                rest = [f"... and {more} more lines"] if more else []
                messages.append("\n  ".join([f"the {kind} printed:", *lines, *rest]))
        return messages
