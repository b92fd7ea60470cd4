"""A call that was sent to a worker, the error that Ray returned for it, and a clock of the calls in progress."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    UnserializableException,
    WorkerCrashedError,
)

from grpo_dist.errors import DataLost, GrpoDistError, WorkerError, WorkerLost, in_a_line
from grpo_dist.runtime.batch_ref import DataProtoRef, Label

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True, eq=False)
class Call:
    """A call that was sent to a worker."""

    ref: ray.ObjectRef | None  # to the answer; None for what was posted, or sent where there is no process
    group: Any  # the `WorkerGroup` that has sent it
    rank: int
    stage: str
    started: float  # `time.monotonic()` when the call was sent
    limit_s: float  # seconds that it may take
    process: Any = None  # the actor handle of the process that was called
    data: ray.ObjectRef | None = None  # to what was returned besides the answer; see `WorkerGroup.submit_for_data`
    # the answer to what was posted, and where its data begin; see `WorkerGroup.post`
    posted: asyncio.Future[tuple[Any, ray.ObjectRef | None, int]] | None = None

    async def answer(self) -> Any:
        """Wait for the answer.

        Raises:
            GrpoDistError: the call failed, its worker died, or it exceeded its time limit.
        """
        try:
            async with asyncio.timeout(self.limit_s - (time.monotonic() - self.started)):
                return await self.group.value(self)
        except TimeoutError:
            raise await self.group.late([self], self.limit_s) from None

    def handle(self, label: Label, row: int = 0) -> DataProtoRef:
        """A handle to the data that was returned with the answer, or to its rows from `row` on."""
        data, first = (self.data, 0) if self.posted is None else self.posted.result()[1:]
        assert data is not None, "only `submit_for_data` and `post` ask for data"
        return DataProtoRef.stored(data, label, first + row)

    @property
    def is_current(self) -> bool:
        """Tell if the process that was called is still the worker of this rank."""
        return self.process is self.group.handles[self.rank]


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


# A RayTaskError's text holds the remote traceback; this much of its end is kept.
TRACEBACK_CHARS = 4000


def failure(error: RayError, role: str, rank: int, node: str, stage: str) -> GrpoDistError:
    """The error that Ray returned for a call to a worker: what the worker raised, or how it was lost."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, WorkerError):
            cause.locate(role, rank, node, stage)
        if isinstance(cause, GrpoDistError):
            return cause
        if isinstance(cause, ObjectLostError):
            what = "what it needs was in the memory of a machine that is lost"
            return DataLost(f"{role} worker {rank} on {node}, stage {stage!r}: {what}")
        text = f"{type(cause).__name__}: {cause}" if cause is not None else str(error).strip().splitlines()[-1]
        return WorkerError(text, role, rank, node, stage, str(error)[-TRACEBACK_CHARS:])
    if isinstance(error, RayActorError | WorkerCrashedError | NodeDiedError | OutOfMemoryError):
        kind = WorkerError if getattr(error, "actor_init_failed", False) else WorkerLost  # it would fail again
        return kind(f"its process died ({_cause_of_death(error)})", role, rank, node, stage)
    if isinstance(error, UnserializableException):  # its text ends with the original traceback
        text = str(error).strip()
        return WorkerError(text.splitlines()[-1], role, rank, node, stage, text[-TRACEBACK_CHARS:])
    if isinstance(error, ObjectLostError):
        return WorkerLost("its answer was in the memory of a machine that is lost", role, rank, node, stage)
    return WorkerError(in_a_line(error), role, rank, node, stage)


def _cause_of_death(error: RayError) -> str:
    """Why a process died: the exit detail of Ray's report, without its general advice."""
    if getattr(error, "actor_init_failed", False):  # the report ends with the constructor's traceback
        return str(error).strip().splitlines()[-1]
    report = " ".join(str(error).split())
    _, _, detail = report.rpartition("Worker exit detail: ")
    return (detail or report).partition("Some common causes")[0].strip()[:300]
