"""SIGTERM, as sent by a scheduler: the run stops at a point where its state can be saved."""

from __future__ import annotations

from types import FrameType

from grpo_dist.errors import Terminated


class Preemption:
    """Delays SIGTERM until the run can be saved.

    The signal can arrive between any two instructions, for example after a prompt was drawn but before it was recorded,
    or in the middle of an update. While `held` is set it is delayed; a second SIGTERM stops the run at once.

    Attributes:
        asked: whether SIGTERM has arrived.
        held: whether SIGTERM is delayed.
    """

    def __init__(self) -> None:
        self.asked = self.held = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler.

        Raises:
            Terminated: SIGTERM is not delayed, or this is the second one. (Ray's calls turn it into KeyboardInterrupt.)
        """
        waits, self.asked = self.held and not self.asked, True
        if not waits:
            raise Terminated

    def hold(self) -> None:
        """Delay SIGTERM from now on."""
        self.held = True

    def release(self) -> None:
        """Stop delaying SIGTERM, because the run can be saved now.

        Raises:
            Terminated: SIGTERM arrived meanwhile.
        """
        self.held = False
        if self.asked:
            raise Terminated
