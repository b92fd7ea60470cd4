"""Pool: workers that answer independently of each other; load balancing and replacement of failed workers.

A request waits in a queue until a worker has capacity, and goes to the worker with the lowest load. A lost worker is
killed and started again, as often as the run's restart budget allows. Its requests return to their old places in the
queue, and are sent to any worker that has capacity.

If it was lost with its machine and no other one has room, the pool goes on with fewer workers until one has.

Workers that are not required come when there is room for them. They cost no restart and end no run: one whose machine
is lost waits for another one, one that fails otherwise is left out from then on, and all of them leave their room to a
required worker that has none.
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
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.event_loop import in_background
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.nodes import RestartBudget

# Converts a call and its answer into the result of the request; may raise.
TakeIn = Callable[[Call, Any], Any]


@dataclass
class Member:
    """One worker of a pool: how much it has in flight (`taken`) and may have (`limit`)."""

    limit: int = 1
    taken: int = 0
    is_ready: bool = True  # gets requests; False while it is started again

    @property
    def load(self) -> float:
        """`taken / limit`; infinite while it gets no requests."""
        return self.taken / self.limit if self.is_ready else math.inf


@dataclass(order=True)
class Waiting:
    """A request, ordered by its place in the queue."""

    later: bool
    number: int
    send: Callable[[int], Call] = field(compare=False)
    size: int = field(compare=False)
    key: Hashable = field(compare=False)
    take_in: TakeIn = field(compare=False)
    sent: asyncio.Future[tuple[Call, asyncio.Task[Any]]] = field(compare=False)


class Pool:
    """Workers that answer independently of each other; errors of `replaces` replace one, others reach the caller."""

    def __init__(
        self, workers: WorkerGroup, restarts: RestartBudget, replaces: tuple[type[GrpoDistError], ...] = (WorkerLost,)
    ) -> None:
        self.workers, self.restarts, self.replaces = workers, restarts, replaces
        self.settings: list[Any] = [None] * len(workers)
        self.members = [self.new_member(rank) for rank in range(len(workers))]
        # `Member.load` by rank, as an array for speed: there may be hundreds of workers
        self._loads = np.zeros(len(workers))
        self._homes: dict[Hashable, int] = {}
        self._queue: list[Waiting] = []
        self._order = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starts: dict[int, asyncio.Task[None]] = {}
        self._waits_for_room: dict[int, asyncio.Task[None]] = {}
        self._left_out: set[int] = set()
        self._raised: dict[int, str] = {}  # by a worker, which has answered nothing since
        restarts.nodes.give_way.append(self._give_way)
        self._failure: GrpoDistError | None = None
        self._someone = asyncio.Event()  # set while a worker is ready, and after a failure of the pool
        self._someone.set()

    # --- for subclasses -----------------------------------------------------------------------------------------
    def new_member(self, rank: int) -> Member:
        """The state of a worker that has just been started with `settings[rank]`."""
        return Member()

    async def prepare(self, rank: int) -> None:
        """Prepare a worker that was started again for its first request."""

    # --- starting ----------------------------------------------------------------------------------------------
    async def start(self, settings: Sequence[Any]) -> list[Any]:
        """Start all workers at the same time, each with its own settings; returns their answers.

        Those for which there is no room yet are started later; their answer is None.
        """
        ranks = self.workers.present
        await self.workers.call_home()
        self.settings = list(settings)
        self.members = [self.new_member(rank) for rank in range(len(self.workers))]
        for rank in set(range(len(self.workers))).difference(ranks):
            self._take_out(rank)
            self._wait_for_room(rank)
        calls = [self.workers.submit(rank, "start", "start", self.settings[rank]) for rank in ranks]
        answers = dict(zip(ranks, await self.workers.answers(calls), strict=True))
        return [answers.get(rank) for rank in range(len(self.workers))]

    def replace(self, rank: int, process: Any, error: GrpoDistError) -> None:
        """Kill a worker's process and have a new one started, unless that process has already been replaced.

        If the restart budget is used up, or the process before has raised the same and nothing was answered in between,
        `error` is raised in all requests.
        """
        if process is None or process is not self.workers.handles[rank]:
            return
        self.workers.retire(rank)
        self._take_out(rank)
        if not isinstance(error, WorkerLost) and self.workers.is_required(rank):
            if self._raised.get(rank) == str(error):
                most = f"trainer.max_worker_restarts={self.restarts.most}"
                error.add_note(
                    f"it failed in the same way before it was started again; another time ({most}) is no help"
                )
                self._fail(error)
                return
            self._raised[rank] = str(error)
        again = self._start_again if self.workers.is_required(rank) else self._go_on_without
        self._starts[rank] = self.spawn(again(rank, error))

    def _take_out(self, rank: int) -> None:
        self.members[rank] = self.new_member(rank)
        self.members[rank].is_ready = False
        self.update_load(rank)

    async def _start_again(self, rank: int, error: GrpoDistError) -> None:
        try:
            await self.restarts.judge(error, self.workers.node_id(rank))
        except GrpoDistError as last:
            self._fail(last)
            return
        if await self.restarts.nodes.has_room(self.workers.bundles[rank]):
            await self._start_process(rank)
        else:
            self._wait_for_room(rank)

    async def _go_on_without(self, rank: int, error: GrpoDistError) -> None:
        """After a worker was lost that is not required: wait for another machine, or leave it out."""
        node_id, dead = self.workers.node_id(rank), await self.restarts.nodes.dead()
        self.restarts.note_machine(node_id, dead)
        if rank in self._left_out:
            return
        if node_id in dead or not await self.restarts.nodes.has_room(self.workers.bundles[rank]):
            self.restarts.nodes.tell(f"{self._named(rank)} is lost with its machine, and waits for another one")
            self._wait_for_room(rank)
        else:
            self._leave_out(rank, str(error))

    def _leave_out(self, rank: int, why: str) -> None:
        """Go on without a worker that is not required, for good, and leave its room to others."""
        self._left_out.add(rank)
        if rank in self._waits_for_room:
            self._waits_for_room.pop(rank).cancel()
        self.workers.retire(rank)
        self._take_out(rank)
        self.spawn(self.restarts.nodes.leave_room(self.workers.bundles[rank]))
        self.restarts.nodes.tell(f"the run goes on without {self._named(rank)}, which it can do without: {why}")

    def _give_way(self) -> None:
        for rank in range(len(self.workers)):
            if not self.workers.is_required(rank) and rank not in self._left_out:
                self._leave_out(rank, "its room is needed for what is lost")

    def _named(self, rank: int) -> str:
        return f"{self.workers.role} worker {rank}"

    def _wait_for_room(self, rank: int) -> None:
        self._waits_for_room[rank] = self.spawn(self._start_in_time(rank))

    async def _start_in_time(self, rank: int) -> None:
        """Start a worker when there is room for it; the pool has time while another worker is there."""
        try:
            await self.restarts.nodes.wait_for_room(
                self.workers.role, [self.workers.bundles[rank]], lambda: bool(self.workers.present)
            )
        except GrpoDistError as error:
            self._fail(error)
        else:
            del self._waits_for_room[rank]
            self.restarts.nodes.tell(f"{self._named(rank)} starts: a machine has room for it")
            self._starts[rank] = self.spawn(self._start_process(rank))

    async def _start_process(self, rank: int) -> None:
        self.workers.respawn(rank)
        self._take_out(rank)
        await self._started_again(self.workers.submit(rank, "start", "start", self.settings[rank]))  # its first call

    def is_starting(self, rank: int) -> bool:
        """Tell if a worker's new process is still starting, or cannot be started yet."""
        return rank not in self.workers.present or (rank in self._starts and not self._starts[rank].done())

    @property
    def num_ready(self) -> int:
        """Return the number of workers that get requests."""
        return sum(member.is_ready for member in self.members)

    async def started(self) -> None:
        """Wait until no process is starting. Those for which no machine has room are not waited for.

        Raises:
            GrpoDistError: the restart budget is used up.
        """
        while starting := [task for task in self._starts.values() if not task.done()]:
            await asyncio.wait(starting)
        if self._failure is not None:
            raise self._failure

    async def _started_again(self, start: Call) -> None:
        try:
            await start.answer()
        except GrpoDistError as error:
            if isinstance(error, self.replaces) or not self.workers.is_required(start.rank):
                self.replace(start.rank, start.process, error)
            else:
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
        """Record an error that the pool cannot recover from, and raise it in all waiting requests."""
        self._failure = self._failure or error
        self._someone.set()
        for waiting in self._queue:
            if not waiting.sent.done():
                waiting.sent.set_exception(self._failure)
        self._queue.clear()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the background, as a task of this pool."""
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
        """Send a request to the worker with the lowest load; to another one, if that worker is lost.

        Args:
            send: sends the call to the worker of a rank.
            take_in: converts the answer into the result; may raise one of `replaces`.
            size: how much of a worker's capacity the request takes.
            key: prefer the worker that got the last request with the same key, because it answers faster.
            first: put the request at the head of the queue.
            give_up: called if the caller is cancelled after the request was sent; tells the worker to abort it.

        Raises:
            GrpoDistError: an error that would occur on every worker, or the restart budget is used up.
        """
        later, number = not first, next(self._order)
        while self._failure is None:
            sent = asyncio.get_running_loop().create_future()
            heapq.heappush(self._queue, Waiting(later, number, send, size, key, take_in, sent))
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
        """As `ask`, but without the queue: the worker with the lowest load gets it at once, even at full capacity."""
        while await self._someone.wait() and self._failure is None:
            call = send(int(self._loads.argmin()))
            try:
                return self._taken_in(call, take_in, await call.answer())
            except self.replaces as error:
                self.replace(call.rank, call.process, error)
        assert self._failure is not None
        raise self._failure

    def _grant(self) -> None:
        """Send queued requests to workers with capacity, at once, so that a chosen worker cannot be lost before."""
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

    async def _answered(self, call: Call, member: Member, waiting: Waiting) -> Any:
        """Wait for the answer even if the caller was cancelled, since the worker's capacity is taken until then."""
        try:
            return self._taken_in(call, waiting.take_in, await call.answer())
        except self.replaces as error:
            self.replace(call.rank, call.process, error)
            raise
        finally:
            member.taken -= waiting.size
            self.update_load(call.rank)
            self._grant()

    def _taken_in(self, call: Call, take_in: TakeIn, answer: Any) -> Any:
        result = take_in(call, answer)
        self._raised.pop(call.rank, None)
        return result

    def update_load(self, rank: int) -> None:
        """Update the load of a worker after its `Member` has changed."""
        self._loads[rank] = self.members[rank].load
        if self._failure is not None or self._loads.min() < math.inf:
            self._someone.set()
        else:
            self._someone.clear()
