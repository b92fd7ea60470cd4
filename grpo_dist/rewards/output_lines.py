"""The lines that a reward function prints: the first ones are kept to be shown, the others are counted."""

from __future__ import annotations

MOST_LINES = 5
MOST_LINE_BYTES = 500


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
        """The first lines since the last call, and the number of further lines."""
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
