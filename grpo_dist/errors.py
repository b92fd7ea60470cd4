"""The errors of grpo_dist.

    GrpoDistError            exit code 1: the run stopped; the message names role, rank, node and stage
    ├── ConfigError          exit code 2, no traceback: something the user wrote and can mend (also a ValueError)
    │   └── DataError        a data file, row or model folder cannot be used
    ├── BatchError           a contract of protocol/fields.py was broken (also a ValueError)
    ├── RewardError          a reward function raised, returned nonsense, or did not return in time
    ├── AgentError           an agent loop raised, or did not come back in time
    ├── TrainingDiverged     a non-finite loss or gradient, found before the optimizer step
    ├── HealthError          a rule of trainer.health with action=stop is broken
    ├── WeightSyncError      new weights arrived damaged, incomplete or out of order; says what the engine now holds
    ├── EngineError          the rollout engine failed or hangs: its worker is replaced
    ├── CheckpointError      a checkpoint cannot be written or read
    └── WorkerError          a worker process failed; carries role, rank, node, stage and its traceback
        ├── WorkerLost       its process died or does not answer: not the fault of what it was asked for
        └── OutOfMemory      its GPU's memory was not enough; carries the key to lower
    Terminated               SIGTERM, a KeyboardInterrupt by someone else: exit code 143

Every message says what failed, the value, the config key or the rank, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM: an interruption like Ctrl-C, by someone else. It ends the run the same way."""


class GrpoDistError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class ConfigError(GrpoDistError, ValueError):
    """A setting is unknown, has the wrong type or range, or contradicts another one."""

    exit_code = 2


class DataError(ConfigError):
    """A data file, a row of it, or a model folder cannot be used."""


class BatchError(GrpoDistError, ValueError):
    """A batch misses a column, or its columns disagree."""


class RewardError(GrpoDistError):
    """A reward function raised, returned nonsense, or did not return in time."""


class AgentError(GrpoDistError):
    """An agent loop raised, or did not come back in time."""


class TrainingDiverged(GrpoDistError):
    """The loss or the gradient is not finite; the optimizer step was not taken."""


class HealthError(GrpoDistError):
    """A rule of `trainer.health` with `action=stop` is broken; the step's metrics are logged."""


class WeightSyncError(GrpoDistError):
    """New weights arrived damaged, incomplete or out of order; it says what the engine now holds."""


class EngineError(GrpoDistError):
    """The rollout engine failed or hangs; its worker is replaced."""


class CheckpointError(GrpoDistError):
    """A checkpoint cannot be written or read."""


class WorkerError(GrpoDistError):
    """A worker process failed.

    Args:
        message: what happened, in one line.
        role: "actor", "rollout", "ref" or "reward".
        rank: position of the worker in its group.
        node: host the worker ran on ("?" when it never started).
        stage: what it was asked to do.
        remote_traceback: the traceback inside the worker, if it raised.
    """

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
        """Say whose it is: a worker that raises it does not know."""
        self.role, self.rank, self.node, self.stage = role, rank, node, stage

    def __str__(self) -> str:
        return f"{self.role} worker {self.rank} on {self.node}, stage {self.stage!r}: {self.message}"


class WorkerLost(WorkerError):
    """A worker's process died or does not answer. What it was asked for may be asked again, of another process."""


class OutOfMemory(WorkerError):
    """The memory of a worker's GPU was not enough.

    Args:
        message: for what, in one line.
        location: role, rank, ... as for `WorkerError`; a worker that raises it leaves them out (see `locate`).
        remedy: what to do.
        setting: key and value whose half takes about half of the memory; None: there is none.
    """

    def __init__(self, message: str, *location: Any, remedy: str = "", setting: tuple[str, int] | None = None) -> None:
        super().__init__(message, *location)
        self.remedy, self.setting = remedy, setting

    def __str__(self) -> str:
        return f"{super().__str__()}; {self.remedy}" if self.remedy else super().__str__()
