"""Measures how long a worker has been busy."""

from __future__ import annotations

import time


class BusyClock:
    """Counts the seconds during which at least one call was in progress."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds, self._open, self._since = seconds, 0, 0.0

    def begin(self) -> None:
        """A call begins."""
        if self._open == 0:
            self._since = time.monotonic()
        self._open += 1

    def end(self) -> None:
        """A call has ended."""
        self._open -= 1
        if self._open == 0:
            self._seconds += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        """Busy seconds so far."""
        return self._seconds + (time.monotonic() - self._since if self._open else 0.0)
