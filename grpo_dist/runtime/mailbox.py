"""Many requests to one worker in few Ray calls.

A Ray call costs the driver and the worker about a millisecond each, as much as a small engine needs for some tokens.
Requests that are posted to a worker in the same turn of the driver's loop travel in one call. What the worker finishes
within a few milliseconds comes back in one, with its data in one object: the driver always has one call for answers
waiting at the worker (`collect`).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import traceback
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_dist.errors import GrpoDistError, WorkerError
from grpo_dist.protocol import DataProto
from grpo_dist.runtime.call import TRACEBACK_CHARS
from grpo_dist.runtime.event_loop import give, in_background

# After the first answer a worker waits this long for further ones.
LINGER_S = 0.005


@dataclass(frozen=True)
class Request:
    """A method to call; `number` tells the answers apart."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Outcome:
    """The answer of a method, or its error; its data are `rows` rows of the object that comes with it."""

    number: int
    answer: Any = None
    rows: int = 0
    error: GrpoDistError | None = None


# --- the worker's side ----------------------------------------------------------------------------------------------
class Mailbox:
    """Base class of asynchronous workers that take requests from mailboxes.

    The methods that are called return (answer, data), where data is a batch, or None.
    """

    @functools.cached_property
    def _mail(self) -> defaultdict[str, _Mail]:
        return defaultdict(_Mail)

    async def take(self, box: str, requests: Sequence[Request]) -> None:
        """Begin to work on requests."""
        self._mail[box].begin(self, requests)

    async def collect(self, box: str, requests: Sequence[Request]) -> tuple[list[Outcome], DataProto | None]:
        """Begin to work on requests, and wait until one of the box has an answer; all answers until then, and data."""
        mail = self._mail[box]
        mail.begin(self, requests)
        await mail.any.wait()
        if mail.tasks:
            await asyncio.sleep(LINGER_S)
        return mail.hand_out()


class _Mail:
    """The requests of one box, at the worker."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.finished: list[tuple[Outcome, DataProto | None]] = []
        self.any = asyncio.Event()

    def begin(self, worker: Any, requests: Sequence[Request]) -> None:
        for request in requests:
            in_background(self._work(worker, request), self.tasks)

    async def _work(self, worker: Any, request: Request) -> None:
        data = None
        try:
            answer, data = await getattr(worker, request.method)(*request.arguments)
            outcome = Outcome(request.number, answer, 0 if data is None else len(data))
        except GrpoDistError as error:
            outcome = Outcome(request.number, error=error)
        except Exception as error:  # noqa: BLE001 - raised on the driver, with this traceback
            text = "".join(traceback.format_exception(error))[-TRACEBACK_CHARS:]
            error_of_call = WorkerError(f"{type(error).__name__}: {error}", remote_traceback=text)
            outcome = Outcome(request.number, error=error_of_call)
        self.finished.append((outcome, data))
        self.any.set()

    def hand_out(self) -> tuple[list[Outcome], DataProto | None]:
        finished, self.finished = self.finished, []
        self.any.clear()
        data = [part for _, part in finished if part is not None]
        return [outcome for outcome, _ in finished], DataProto.concat(data) if data else None


# --- the driver's side ----------------------------------------------------------------------------------------------
class Postbox:
    """Posts requests of one stage to one process, and receives the answers."""

    def __init__(self, group: Any, rank: int, stage: str) -> None:
        self.group, self.rank, self.stage = group, rank, stage
        self.process = group.handles[rank]
        self.id = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._new: list[Request] = []
        self._collecting = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def post(self, method: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Send a request together with all others of this turn of the loop."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        self._open[number] = loop.create_future()
        if not self._new:
            loop.call_soon(self.flush)
        self._new.append(Request(number, method, arguments))
        return self._open[number]

    def flush(self) -> None:
        """Send what has been posted."""
        new, self._new = self._new, []
        if self.process is not self.group.handles[self.rank]:
            self._fail(list(self._open), self.group.lost(self.rank, self.stage, "its process was replaced"))
        if not new or not self._open:
            return
        if self._collecting:
            call = self.group.submit(self.rank, self.stage, "take", self.id, new)
            in_background(self._taken(call, new), self._tasks)
        else:
            self._collecting = True
            in_background(self._receive(self._collect(new)), self._tasks)

    def _collect(self, requests: list[Request]) -> Any:
        return self.group.submit_for_data(self.rank, self.stage, "collect", self.id, requests)

    async def _taken(self, call: Any, requests: list[Request]) -> None:
        try:
            await self.group.value(call)
        except GrpoDistError as error:
            self._fail([request.number for request in requests], error)

    async def _receive(self, call: Any) -> None:
        """Take in answers until there are no open requests."""
        try:
            while True:
                outcomes = await self.group.value(call)
                row = 0
                for outcome in outcomes:
                    if (answered := self._open.pop(outcome.number, None)) is not None:
                        give(answered, outcome.error or (outcome.answer, call.data, row))
                    row += outcome.rows
                if not self._open:
                    return
                call = self._collect([])
        except GrpoDistError as error:
            self._new.clear()
            self._fail(list(self._open), error)
        finally:
            self._collecting = False

    def _fail(self, numbers: Sequence[int], error: GrpoDistError) -> None:
        for number in numbers:
            if (answered := self._open.pop(number, None)) is not None:
                give(answered, error)
