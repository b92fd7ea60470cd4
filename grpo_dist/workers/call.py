"""A call that was sent to a worker, what it needs of the group that sent it, and who is told of calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from grpo_dist.errors import GrpoDistError, WorkerLost
from grpo_dist.workers.batch_ref import DataProtoRef, Label
from grpo_dist.workers.mailbox import Posted

if TYPE_CHECKING:
    import ray


class Caller(Protocol):
    """What a call needs of the `WorkerGroup` that sent it."""

    role: str
    handles: list[Any]

    async def value(self, call: Call) -> Any:
        """See `WorkerGroup`, here and below."""

    async def outcomes(self, calls: Sequence[Call]) -> list[Any]:
        """The answers and errors of calls."""

    async def late(self, calls: Sequence[Call], limit_s: float) -> WorkerLost:
        """The error of calls that were not answered in time."""

    async def root_cause(self, error: GrpoDistError, unanswered: Mapping[Call, asyncio.Future[Any]]) -> GrpoDistError:
        """The error that another one comes from."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call that was sent to a worker.

    Attributes:
        ref: Ray's reference to the answer; None for what was posted, or sent where there is no process.
        group: the worker's group.
        rank: the worker's rank.
        stage: the stage that the call belongs to, for messages.
        started: `time.monotonic()` when the call was sent.
        limit_s: seconds that it may take.
        process: the actor handle of the process that was called.
        data: reference to the data returned besides the answer; see `WorkerGroup.submit_for_data`.
        posted: the request, if it was posted; see `WorkerGroup.post`.
    """

    ref: ray.ObjectRef | None
    group: Caller
    rank: int
    stage: str
    started: float
    limit_s: float
    process: Any = None
    data: ray.ObjectRef | None = None
    posted: Posted | None = None

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
        data, first = (self.data, 0) if self.posted is None else self.posted.answered.result()[1:]
        assert data is not None, "only `submit_for_data` and `post` ask for data"
        return DataProtoRef.stored(data, label, first + row)

    @property
    def is_current(self) -> bool:
        """Whether the process that was called is still the worker of this rank."""
        return self.process is self.group.handles[self.rank]


class CallObserver(Protocol):
    """Is told of the calls of worker groups, on the driver's event loop."""

    def sent(self, call: Call, method: str, args: tuple[Any, ...]) -> None:
        """A call was sent, or posted."""

    def answered(self, call: Call) -> None:
        """It has an answer, or has failed."""
