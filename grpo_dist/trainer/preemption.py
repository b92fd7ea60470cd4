"""SIGTERM, as sent by a scheduler, and SIGINT, the Ctrl-C of a terminal: the run stops where its state can be saved."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from grpo_dist.errors import Interrupted, Terminated

_STDERR = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Preemption:
    """Delays a signal until the run can be saved.

    The signal can arrive between any two instructions, for example after a prompt was drawn but before it was recorded,
    or in the middle of an update. While `held` is set it is delayed; a second signal stops the run at once.

    Attributes:
        number: the signal that has arrived; None: none has.
        held: whether a signal is delayed, from now on.
        checkpoint: the last checkpoint of the run, once it has stopped; None: there is none.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.held = False
        self.checkpoint: Path | None = None
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Handle SIGTERM, and SIGINT unless this process ignores it, as background jobs of scripts do.

        Does nothing in another thread than the main one, as Python has signals handled in that one alone.
        """
        if not _in_main_thread():
            return
        self._before = self._before or {number: signal.getsignal(number) for number in _SIGNALS}
        signal.signal(signal.SIGTERM, self.handle)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self.handle)

    def ignore(self) -> None:
        """Ignore both signals: a second one must not cut the clean-up short."""
        if _in_main_thread():
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Put the handlers back that were there before: the process may go on after the run."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        """Tell if a signal has arrived."""
        return self.number is not None

    @property
    def name(self) -> str:
        """The name of the signal that has arrived."""
        return "" if self.number is None else self.number.name

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler.

        Raises:
            Interrupted: the signal is not delayed, or this is the second one. (Ray's calls turn it into
                KeyboardInterrupt.)
        """
        waits = self.held and not self.asked
        self.number = self.number or signal.Signals(signum)
        if not waits:
            raise self.interrupt()
        message = (
            f"\n{self.name}: the run ends after this step, with a checkpoint; another {self.name} ends it at once\n"
        )
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(_STDERR, message.encode())  # a stream may be in use where the signal has come

    def interrupt(self) -> Interrupted:
        """The exception that ends the run."""
        ended = Terminated() if self.number == signal.SIGTERM else Interrupted()
        ended.checkpoint = self.checkpoint
        return ended

    def release(self) -> None:
        """Stop delaying signals, because the run can be saved now.

        Raises:
            Interrupted: a signal arrived meanwhile.
        """
        self.held = False
        if self.asked:
            raise self.interrupt()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
