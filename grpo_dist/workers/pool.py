"""Pool: workers that answer alone. Who has room, who failed, who is being replaced.

What is asked waits until a worker has room, and goes to the one with the smallest share of its room taken. A worker
that is lost is ended and started again, as often as the run's budget allows; what it was asked for is asked again, at
its old place in the queue, of whoever has room then.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_dist.errors import GrpoDistError, WorkerLost
from grpo_dist.workers.event_loop import in_background
from grpo_dist.workers.group import Call, WorkerGroup
from grpo_dist.workers.restarts import RestartBudget

# Makes of a call and its answer what whoever asked gets; may raise.
TakeIn = Callable[[Call, Any], Any]


@dataclass
class Member:
    """One worker of a pool.

    Attributes:
        limit: how much it may have in flight.
        taken: how much it has in flight.
        is_ready: whether it takes part; not while it starts again.
    """

    limit: int = 1
    taken: int = 0
    is_ready: bool = True

    @property
    def load(self) -> float:
        """Share of its limit that is in flight; infinite while it takes no part."""
        return self.taken / self.limit if self.is_ready else math.inf


@dataclass(order=True)
class _Waiting:
    """Something to be asked, and its place in the queue."""

    later: bool
    number: int
    send: Callable[[int], Call] = field(compare=False)
    size: int = field(compare=False)
    key: Hashable = field(compare=False)
    take_in: TakeIn = field(compare=False)
    sent: asyncio.Future[tuple[Call, asyncio.Task[Any]]] = field(compare=False)


class Pool:
    """Workers that answer alone.

    Args:
        workers: their processes.
        restarts: how many may be replaced.
        replaces: errors after which a worker is replaced; all others are the caller's.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        restarts: RestartBudget,
        replaces: tuple[type[GrpoDistError], ...] = (WorkerLost,),
    ) -> None:
        self.workers, self.restarts, self.replaces = workers, restarts, replaces
        self.settings: list[Any] = [None] * len(workers)
        self.members = [self.new_member(rank) for rank in range(len(workers))]
        self._loads = np.zeros(len(workers))  # by rank, `Member.load`: there may be hundreds, and many calls
        self._homes: dict[Hashable, int] = {}
        self._queue: list[_Waiting] = []
        self._order = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starts: dict[int, asyncio.Task[None]] = {}
        self._failure: GrpoDistError | None = None

    # --- what a kind of pool decides ---------------------------------------------------------------------------
    def new_member(self, rank: int) -> Member:
        """A worker that has just been started, with `settings[rank]`."""
        return Member()

    async def prepare(self, rank: int) -> None:
        """What a worker that was started again must have before it takes part."""

    # --- starting ----------------------------------------------------------------------------------------------
    async def start(self, settings: Sequence[Any]) -> list[Any]:
        """Start all workers at the same time, each with settings of its own; their answers."""
        await self.workers.call_home()
        self.settings = list(settings)
        self.members = [self.new_member(rank) for rank in range(len(self.workers))]
        return await self.workers.ask_each("start", "start", [(each,) for each in settings])

    def replace(self, rank: int, process: Any, error: GrpoDistError) -> None:
        """End a worker's process and start it again, unless that has happened already.

        Args:
            rank: of the worker.
            process: the handle of what failed.
            error: how it failed.

        Raises:
            GrpoDistError: `error`, if too many workers have been replaced.
        """
        if process is not self.workers.handles[rank]:
            return
        try:
            self.restarts.spend(error)
        except GrpoDistError:
            self._fail(error)
            raise
        self.workers.respawn(rank)
        self.members[rank] = self.new_member(rank)
        self.members[rank].is_ready = False
        self.update_load(rank)
        start = self.workers.submit(rank, "start", "start", self.settings[rank])  # before all that it is asked
        self._starts[rank] = self.spawn(self._started_again(start))

    def is_starting(self, rank: int) -> bool:
        """Whether a worker's process was replaced and has not started yet."""
        return rank in self._starts and not self._starts[rank].done()

    async def started(self) -> None:
        """Wait until no process is starting.

        Raises:
            GrpoDistError: too many workers have been replaced.
        """
        while starting := [task for task in self._starts.values() if not task.done()]:
            await asyncio.wait(starting)
        if self._failure is not None:
            raise self._failure

    async def _started_again(self, start: Call) -> None:
        try:
            await start.answer()
        except self.replaces as error:
            self.replace(start.rank, start.process, error)
        except GrpoDistError as error:
            self._fail(error)
        else:
            self.spawn(self._take_part(start.rank, self.members[start.rank]))

    async def _take_part(self, rank: int, member: Member) -> None:
        try:
            await self.prepare(rank)
        except GrpoDistError as error:
            self._fail(error)
            return
        if member is self.members[rank]:
            member.is_ready = True
            self.update_load(rank)
            self._grant()

    def _fail(self, error: GrpoDistError) -> None:
        """The pool cannot go on: whoever asks it is told so."""
        self._failure = self._failure or error
        for waiting in self._queue:
            if not waiting.sent.done():
                waiting.sent.set_exception(self._failure)
        self._queue.clear()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something that goes on by itself; its failure is told to those whom it concerns."""
        return in_background(coroutine, self._tasks)

    # --- asking ------------------------------------------------------------------------------------------------
    async def ask(
        self,
        send: Callable[[int], Call],
        take_in: TakeIn,
        *,
        size: int = 1,
        key: Hashable = None,
        first: bool = False,
        give_up: Callable[[Call], None] = lambda call: None,
    ) -> Any:
        """Ask the worker with the most room; another one, if that is lost.

        Args:
            send: sends the call to the worker of a rank.
            take_in: makes of the answer what is returned; may raise one of `replaces`.
            size: how much of a worker's room it takes.
            key: the worker that was asked last with the same key answers faster.
            first: before all that waits.
            give_up: tells the worker that its answer is not wanted any more; called if the caller is cancelled.

        Raises:
            GrpoDistError: a mistake that another worker would make too, or too many workers have been replaced.
        """
        later, number = not first, next(self._order)
        while self._failure is None:
            sent = asyncio.get_running_loop().create_future()
            heapq.heappush(self._queue, _Waiting(later, number, send, size, key, take_in, sent))
            self._grant()
            try:
                _, answered = await sent
                return await asyncio.shield(answered)
            except asyncio.CancelledError:
                if sent.done() and not sent.cancelled() and sent.exception() is None:
                    call, answered = sent.result()
                    if not answered.done():
                        give_up(call)
                raise
            except self.replaces:
                continue
        raise self._failure

    async def ask_now(self, send: Callable[[int], Call], take_in: TakeIn) -> Any:
        """As `ask`, beside what the workers are asked otherwise: of the one with the most room, also if it has none."""
        while True:
            call = send(int(self._loads.argmin()))
            try:
                return take_in(call, await call.answer())
            except self.replaces as error:
                self.replace(call.rank, call.process, error)

    def _grant(self) -> None:
        """Send what waits to those that have room. Sent at once, a worker cannot be lost between the two."""
        while self._queue and self._loads.min() < 1:
            waiting = heapq.heappop(self._queue)
            if waiting.sent.cancelled():
                continue
            home = None if waiting.key is None else self._homes.get(waiting.key)
            rank = home if home is not None and self._loads[home] < 1 else int(self._loads.argmin())
            if waiting.key is not None:
                self._homes[waiting.key] = rank
            self.members[rank].taken += waiting.size
            self.update_load(rank)
            call = waiting.send(rank)
            waiting.sent.set_result((call, self.spawn(self._answered(call, self.members[rank], waiting))))

    async def _answered(self, call: Call, member: Member, waiting: _Waiting) -> Any:
        """The answer, whether anybody still wants it or not: until it comes the worker's room is taken."""
        try:
            return waiting.take_in(call, await call.answer())
        except self.replaces as error:
            self.replace(call.rank, call.process, error)
            raise
        finally:
            member.taken -= waiting.size
            self.update_load(call.rank)
            self._grant()

    def update_load(self, rank: int) -> None:
        """After a member has changed."""
        self._loads[rank] = self.members[rank].load
