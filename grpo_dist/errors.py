"""The errors of grpo_dist.

Every message says what failed, the value, the config key or the rank, and what to do.
"""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Any


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM ended the run; the same command goes on from its `checkpoint` (None: there is none)."""

    exit_code = 130
    checkpoint: Path | None = None

    def __str__(self) -> str:
        return "stopped by SIGINT"


class Terminated(Interrupted):
    """SIGTERM. It ends the run in the same way as Ctrl-C."""

    exit_code = 143

    def __str__(self) -> str:
        return "stopped by SIGTERM"


class GrpoDistError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class ConfigError(GrpoDistError, ValueError):
    """A setting is unknown, has the wrong type or range, or contradicts another one."""

    exit_code = 2


class DataError(ConfigError):
    """A data file, a row of it, or a model folder cannot be used."""


class BatchError(GrpoDistError, ValueError):
    """A batch misses a column, or its columns disagree (protocol/fields.py)."""


class RewardError(GrpoDistError):
    """A reward function raised, returned an invalid value, or timed out."""


class AgentError(GrpoDistError):
    """An attempt at an episode failed.

    Args:
        kind: "error" (the agent loop raised), "failed" (it said so), "rejected" (it refused the response), "timeout" or
            "turns" (it reached a limit, and there is no reward for what it had done).
        was_last: whether the episode had no attempt left.
    """

    def __init__(self, message: str, kind: str = "error", *, was_last: bool = False) -> None:
        super().__init__(message)
        self.kind, self.was_last = kind, was_last


class TrainingDiverged(GrpoDistError):
    """The loss or the gradient is not finite; the optimizer step was not taken."""


class HealthError(GrpoDistError):
    """A rule of `trainer.health` with `action=stop` is broken; the metrics of the step have been logged."""


class WeightSyncError(GrpoDistError):
    """New weights arrived damaged, incomplete or out of order; the message says what the engine now holds."""


class EngineError(GrpoDistError):
    """The rollout engine failed or hangs; its worker is replaced."""


class CheckpointError(GrpoDistError):
    """A checkpoint cannot be written or read."""


class DiskError(GrpoDistError):
    """A file of the run cannot be written, since the disk is full or has failed. The same command may go on later."""


class RayLost(GrpoDistError):
    """Ray itself is lost, so the run has ended at once."""

    exit_code = 3
    checkpoint: Path | None = None


class DataLost(GrpoDistError):
    """Data of the run were in the memory of a machine that is lost; only a checkpoint can restore them."""


class SandboxError(GrpoDistError):
    """A sandbox is closed, a file cannot be put into it, or what ran in it cannot be ended."""


class WorkerError(GrpoDistError):
    """A worker process failed; `node` is the host that it ran on ("?" when it never started)."""

    def __init__(
        self,
        message: str,
        role: str = "?",
        rank: int = -1,
        node: str = "?",
        stage: str = "?",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message, role, rank, node, stage, remote_traceback)
        self.message, self.role, self.rank, self.node, self.stage = message, role, rank, node, stage
        self.remote_traceback = remote_traceback

    def locate(self, role: str, rank: int, node: str, stage: str) -> None:
        """Set where the error occurred, which the worker that raises it does not know."""
        self.role, self.rank, self.node, self.stage = role, rank, node, stage

    def __str__(self) -> str:
        return f"{self.role} worker {self.rank} on {self.node}, stage {self.stage!r}: {self.message}"


class WorkerLost(WorkerError):
    """A worker's process died or does not answer. The call may be repeated on another process."""


class OutOfMemory(WorkerError):
    """A worker's GPU ran out of memory.

    Args:
        location: role, rank, ... as in `WorkerError`; a worker that raises it leaves them out (see `locate`).
        setting: (key, value) of the setting that, if halved, about halves the memory; None: there is none.
    """

    def __init__(self, message: str, *location: Any, remedy: str = "", setting: tuple[str, int] | None = None) -> None:
        super().__init__(message, *location)
        self.remedy, self.setting = remedy, setting

    def __str__(self) -> str:
        return f"{super().__str__()}; {self.remedy}" if self.remedy else super().__str__()


def require_current_folder() -> None:
    """Raise a ConfigError if the folder of this process is gone, such as a batch job's that was cleaned up."""
    try:
        os.getcwd()
    except OSError:
        raise ConfigError('the current folder is gone; change to one that is there: cd ~, or cd "$PWD"') from None


def in_a_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of what it says, which may be nothing."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def did_you_mean(word: str, names: Iterable[str], form: str = "{!r}") -> str:
    """Return a hint at the name that resembles a word, as the end of a message; "" if none does."""
    nearest = difflib.get_close_matches(word, list(names), n=1)
    return f"; did you mean {form.format(nearest[0])}?" if nearest else ""
