"""The largest of a number while something else runs, such as the memory of a GPU or of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Peak:
    """A context manager that reads a number at its start, and then again and again until its end.

    Args:
        read: returns the number; called in a thread of its own but for the first time.
        every_s: seconds between two readings.

    Attributes:
        before: the first one.
        largest: of all.
    """

    def __init__(self, read: Callable[[], float], every_s: float) -> None:
        self._read, self._every_s, self._over = read, every_s, threading.Event()
        self.before = self.largest = 0.0

    def __enter__(self) -> Peak:
        self.before = self.largest = self._read()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            self.largest = max(self.largest, self._read())
