"""SIGTERM: a scheduler takes the machine back. The run ends where its state is that of a finished step."""

from __future__ import annotations

from types import FrameType

from grpo_dist.errors import Terminated


class Preemption:
    """Whether SIGTERM has come, and when the run gives way to it.

    While the run is `held` it waits: the signal may come between any two instructions, where a prompt is drawn and not
    yet written down, or where the weights are no finished step's. A second SIGTERM ends the run at once.

    Attributes:
        asked: whether it has come.
        held: whether it waits.
    """

    def __init__(self) -> None:
        self.asked = self.held = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """The handler of the signal.

        Raises:
            Terminated: nothing is held, or it is the second one. (Ray's calls make a KeyboardInterrupt of it.)
        """
        waits, self.asked = self.held and not self.asked, True
        if not waits:
            raise Terminated

    def hold(self) -> None:
        """From here on a SIGTERM waits."""
        self.held = True

    def release(self) -> None:
        """The run is where it can be saved, and needs no protection.

        Raises:
            Terminated: one has been waiting.
        """
        self.held = False
        if self.asked:
            raise Terminated
