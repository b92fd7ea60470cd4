"""Ray's errors as errors of this package."""

from __future__ import annotations

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

from grpo_dist.errors import DataLost, GrpoDistError, WorkerError, WorkerLost

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
    return WorkerError(f"{type(error).__name__}: {str(error).splitlines()[0]}", role, rank, node, stage)


def _cause_of_death(error: RayError) -> str:
    """Why a process died: the exit detail of Ray's report, without its general advice."""
    if getattr(error, "actor_init_failed", False):  # the report ends with the constructor's traceback
        return str(error).strip().splitlines()[-1]
    report = " ".join(str(error).split())
    _, _, detail = report.rpartition("Worker exit detail: ")
    return (detail or report).partition("Some common causes")[0].strip()[:300]
