"""What a reward function prints: the first lines are kept for the user, the others counted."""

from __future__ import annotations

MOST_LINES = 5
MOST_LINE_BYTES = 500


class Printed:
    """Takes bytes as they come and makes lines of them, as much as a person reads; the rest is not stored.

    Args:
        most_lines: lines to keep until they are taken.
    """

    def __init__(self, most_lines: int = MOST_LINES) -> None:
        self._most_lines = most_lines
        self._lines: list[str] = []
        self._num_more = 0
        self._rest = b""

    def add(self, block: bytes) -> None:
        """More output."""
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
        """The first lines since the last time, and how many more there were."""
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
