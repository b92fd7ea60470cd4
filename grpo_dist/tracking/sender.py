"""Makes the calls of a tracker's server, so that training does not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

_PAUSE_S = 5.0


class Sender:
    """Makes calls one after the other, in a thread of its own.

    A call that the server does not answer is made again until it does; what is sent meanwhile waits in memory. After
    any other error no call is made any more.

    Args:
        is_absence: whether an error says that the server is away.
    """

    def __init__(self, is_absence: Callable[[Exception], bool]) -> None:
        self.absence: Exception | None = None
        """The last error that said so."""
        self._is_absence = is_absence
        self._error: Exception | None = None
        self._stopped = threading.Event()
        self._calls: SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="tracker", daemon=True).start()

    def send(self, call: Callable[[], object]) -> Future[object]:
        """Have a call made after those before it; raises the error of an earlier one that has failed."""
        if self._error is not None:
            raise self._error
        done: Future[object] = Future()
        self._calls.put((call, done))
        return done

    def stop(self) -> None:
        """Make no further call; one that is under way may go on in the background."""
        self._stopped.set()
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, done = item
            try:
                done.set_result(self._until_answered(call))
            except Exception as error:  # noqa: BLE001 - handed to who waits for the call, or sends the next one
                self._error = self._error or error
                done.set_exception(error)

    def _until_answered(self, call: Callable[[], object]) -> object:
        while self._error is None:
            try:
                return call()
            except Exception as error:
                self.absence = error
                if not self._is_absence(error) or self._stopped.wait(_PAUSE_S):
                    raise
        raise self._error
