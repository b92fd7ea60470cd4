"""WorkerGroup: the processes of one role. The only module that creates Ray actors and waits for them.

A worker is a plain class; `spawn` runs one instance of it in each process. `submit` sends a call; coroutines wait for
the answers, in rank order. Every failure is raised as a `GrpoDistError`: errors of this package unchanged, a
`WorkerLost` if the process died or exceeded its time limit, anything else as a `WorkerError` with role, rank, node and
stage. When ranks work together (`answers`), the first failure ends the wait, because the other ranks may never answer
once a peer is gone. If a lost rank shows up as an error of another rank (a broken connection, a collective operation
that timed out), or delays all ranks, the error names the lost rank.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_dist.errors import GrpoDistError, OutOfMemory, WorkerError, WorkerLost
from grpo_dist.runtime.call import BusyClock, Call, failure
from grpo_dist.runtime.event_loop import TimeLimits, blocking
from grpo_dist.runtime.mailbox import Postbox
from grpo_dist.runtime.process import LOST, Address, Addresses, process_states, with_environment
from grpo_dist.runtime.resources import Bundle

# Ray returns results of up to 100 kB inline, into the driver's memory. With this in its environment a worker leaves all
# results but short ones in the object store, since the driver does not need the data.
DATA_STAYS_IN_STORE = {"RAY_max_direct_call_object_size": "4096"}
# A new process imports torch, transformers or vLLM before it answers, at the same time as many others.
PROCESS_START_S = 600.0
# Ranks that wait in one collective operation fail almost together; the one they waited for has not answered by then.
COLLECTIVE_GRACE_S = 10.0
# Texts that only error messages of gloo and NCCL contain.
_COLLECTIVE_ERRORS = ("gloo/transport/", "gloo/rendezvous/", "ProcessGroupNCCL", "NCCL error", "NCCL communicator")


class WorkerGroup:
    """The workers of one role.

    Args:
        handles: one Ray actor handle per rank; None for one that has no process at the moment.
        limits: seconds without an answer after which a worker counts as hung, by stage.
        make: by rank, a function that starts a new process in place of a lost one.
    """

    def __init__(
        self,
        role: str,
        handles: Sequence[Any],
        limits: TimeLimits,
        make: Sequence[Callable[[], Any]] = (),
        bundles: Sequence[Bundle] = (),
    ) -> None:
        self.role, self.handles, self.limits, self.bundles = role, list(handles), limits, list(bundles)
        self._addresses = Addresses()
        self._make = list(make)
        self._waits: list[set[asyncio.Future[Any]]] = [set() for _ in self.handles]  # for answers, by rank
        self._busy = [BusyClock() for _ in self.handles]
        self._postboxes: dict[int, Postbox] = {}

    @classmethod
    def spawn(
        cls,
        role: str,
        worker_class: type,
        bundles: Sequence[Bundle],
        *,
        args: Sequence[tuple[Any, ...]],
        limits: TimeLimits,
        env: Mapping[str, str] | None = None,
        shared: Mapping[str, str] | None = None,
        max_concurrency: int = 1,
    ) -> WorkerGroup:
        """Start a process in each bundle that is placed, without waiting for them.

        Args:
            worker_class: rank i is built with `worker_class(*args[i])`.
            env: environment variables that a process must have when it starts. Ray logs them: no secrets.
            shared: environment variables that are set before the constructor runs (process.py).
            max_concurrency: calls that a process runs at the same time.
        """
        remote_class: Any = ray.remote(with_environment(worker_class))
        make = []
        for bundle, arguments in zip(bundles, args, strict=True):
            options = remote_class.options(
                num_cpus=bundle.num_cpus,
                num_gpus=bundle.num_gpus,
                max_concurrency=max_concurrency,
                max_restarts=0,
                runtime_env={"env_vars": dict(env)} if env else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(bundle.group, bundle.index),
            )
            make.append(functools.partial(options.remote, dict(shared or {}), *arguments))
        handles = [start() if bundle.placed else None for start, bundle in zip(make, bundles, strict=True)]
        return cls(role, handles, limits, make, bundles)

    def retire(self, rank: int) -> None:
        """Kill a worker's process, if it is alive. Pending waits for its answers raise `WorkerLost`."""
        if self.handles[rank] is not None:
            ray.kill(self.handles[rank])
        for wait in self._waits[rank]:
            if not wait.done():
                wait.set_exception(self.lost(rank, "start", "its process was replaced"))
        self.handles[rank] = None
        self._addresses.forget(rank)

    def respawn(self, rank: int) -> None:
        """Start a new process, in place of a killed one, without waiting."""
        self.retire(rank)
        self.handles[rank] = self._make[rank]()
        self._addresses.expect(rank, self.handles[rank].address.remote())
        self._busy[rank] = BusyClock(self._busy[rank].seconds)

    @property
    def present(self) -> list[int]:
        """The ranks that have a process."""
        return [rank for rank, handle in enumerate(self.handles) if handle is not None]

    def is_required(self, rank: int) -> bool:
        """Tell if the run cannot do without the worker: it may have engines that it can do without."""
        return not self.bundles or self.bundles[rank].required

    def node_id(self, rank: int) -> str:
        """Ray's id of the node of a worker, or of the one before it; "" if none has started yet."""
        address = self._addresses.last(rank)
        return "" if address is None else address.node_id

    def busy_seconds(self) -> float:
        """Seconds that the workers have been busy so far, summed over workers."""
        return sum(clock.seconds for clock in self._busy)

    def __len__(self) -> int:
        return len(self.handles)

    @property
    def addresses(self) -> dict[int, Address]:
        """Addresses of the processes by rank; a new process is missing until it has started."""
        return self._addresses.known()

    async def call_home(self) -> list[Address]:
        """Wait until every process has started; returns and stores their addresses."""
        limit = max(self.limits.of("start"), PROCESS_START_S)
        return self.note_addresses(await self.answers(self.submit_all("start", "address"), limit))

    def note_addresses(self, addresses: Sequence[Address]) -> list[Address]:
        """Store the addresses of the processes, in rank order."""
        self._addresses.note(dict(zip(self.present, addresses, strict=True)))
        return list(addresses)

    # --- asking ------------------------------------------------------------------------------------------------
    def submit(self, rank: int, stage: str, method: str, *args: Any) -> Call:
        """Call a method on one worker, without waiting."""
        handle = self.handles[rank]
        self._busy[rank].begin()
        ref = None if handle is None else getattr(handle, method).remote(*args)
        return Call(ref, self, rank, stage, time.monotonic(), self.limits.of(stage), handle)

    def submit_for_data(self, rank: int, stage: str, method: str, *args: Any, limit_s: float | None = None) -> Call:
        """Call a method that returns (answer, data), without waiting.

        `Call.data` refers to the data, which stays in the object store. It is owned by this process, so unlike an
        object that the worker puts there itself it outlives the worker. `limit_s` replaces the stage's time limit.
        """
        handle, limit = self.handles[rank], self.limits.of(stage) if limit_s is None else limit_s
        self._busy[rank].begin()
        method_of = None if handle is None else getattr(handle, method).options(num_returns=2)
        answer, data = (None, None) if method_of is None else method_of.remote(*args)
        return Call(answer, self, rank, stage, time.monotonic(), limit, handle, data)

    def post(self, rank: int, stage: str, method: str, *args: Any) -> Call:
        """Have a `Mailbox` worker call a method that returns (answer, data), without waiting.

        What is posted to a worker in the same turn of the loop, and what it answers at about the same time, share a
        call and an object in the store, owned by this process. All that is posted to one worker has the same stage.
        """
        box = self._postboxes.get(rank)
        if box is None or box.process is not self.handles[rank]:
            box = self._postboxes[rank] = Postbox(self, rank, stage)
        posted, limit = box.post(method, args), self.limits.of(stage)
        return Call(None, self, rank, stage, time.monotonic(), limit, box.process, posted=posted)

    def tell(self, rank: int, method: str, *args: Any) -> None:
        """Call a method, after all that was posted before, without ever waiting for its answer."""
        if rank in self._postboxes:
            self._postboxes[rank].flush()
        if self.handles[rank] is not None:
            getattr(self.handles[rank], method).remote(*args)

    def submit_all(self, stage: str, method: str, *args: Any) -> list[Call]:
        """Call a method with the same arguments on every worker that has a process, without waiting."""
        return [self.submit(rank, stage, method, *args) for rank in self.present]

    async def ask(self, rank: int, stage: str, method: str, *args: Any) -> Any:
        """Call a method on one worker and wait."""
        return (await self.answers([self.submit(rank, stage, method, *args)]))[0]

    async def ask_all(self, stage: str, method: str, *args: Any) -> list[Any]:
        """Call a method with the same arguments on every worker that has a process; values in rank order."""
        return await self.answers(self.submit_all(stage, method, *args))

    async def answers(self, calls: Sequence[Call], timeout_s: float | None = None) -> list[Any]:
        """Wait for calls of ranks that work together; values in the order of `calls`.

        Raises:
            GrpoDistError: the first failure of any of them, or no answer in time.
        """
        if not calls:
            return []
        limit = max(call.limit_s for call in calls) if timeout_s is None else timeout_s
        values = {call: asyncio.ensure_future(call.group.value(call)) for call in calls}
        try:
            done, waiting = await asyncio.wait(values.values(), timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
            unanswered = {call: value for call, value in values.items() if value in waiting}
            for call, value in values.items():
                if value in done and (error := value.exception()) is not None:
                    raise await call.group.root_cause(error, unanswered) if isinstance(error, GrpoDistError) else error
            if unanswered:
                group = next(iter(unanswered)).group
                raise await group.late([call for call in unanswered if call.group is group], limit)
            return [value.result() for value in values.values()]
        finally:
            for value in values.values():
                value.cancel()
            await asyncio.gather(*values.values(), return_exceptions=True)

    async def outcomes(self, calls: Sequence[Call]) -> list[Any]:
        """Wait until every call has a value or has failed; values and errors in the order of `calls`."""
        outcomes = await asyncio.gather(*(call.answer() for call in calls), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, GrpoDistError):
                raise outcome
        return list(outcomes)

    # The same methods as blocking functions, for code outside the driver's loop.
    call, call_all = blocking(ask), blocking(ask_all)
    gather, settle = blocking(answers), blocking(outcomes)

    async def value(self, call: Call) -> Any:
        """Wait for the answer of a call without a time limit; raises as `Call.answer` does."""
        if call.posted is not None:
            try:
                return (await call.posted)[0]
            except WorkerError as error:
                error.locate(self.role, call.rank, self._node(call.rank), call.stage)
                raise
        if call.ref is None:
            raise self.lost(call.rank, call.stage, "its process is gone, and there is no new one yet")
        loop = asyncio.get_running_loop()
        wait = loop.create_future()
        self._waits[call.rank].add(wait)
        answered = call.ref.future()
        # What it calls back holds `wait`, which must not hold it in turn: garbage in a cycle would keep the answer, and
        # the objects that it refers to, until Python looks for cycles.
        answered.add_done_callback(lambda _: loop.call_soon_threadsafe(self._note_answer, call, wait))
        try:
            await wait
            return answered.result()
        except RayError as error:
            raise failure(error, self.role, call.rank, self._node(call.rank), call.stage) from None
        finally:
            self._waits[call.rank].discard(wait)

    def _note_answer(self, call: Call, wait: asyncio.Future[None]) -> None:
        if call.is_current:
            self._busy[call.rank].end()
        if not wait.done():
            wait.set_result(None)

    # --- failures ----------------------------------------------------------------------------------------------
    def error(self, rank: int, stage: str, message: str, remote_traceback: str = "") -> WorkerError:
        """A WorkerError of one of these workers."""
        return WorkerError(message, self.role, rank, self._node(rank), stage, remote_traceback)

    def lost(self, rank: int, stage: str, message: str) -> WorkerLost:
        """A WorkerLost of one of these workers."""
        return WorkerLost(message, self.role, rank, self._node(rank), stage)

    def _node(self, rank: int) -> str:
        return "?" if (address := self._addresses.last(rank)) is None else address.host

    async def late(self, calls: Sequence[Call], limit_s: float) -> WorkerLost:
        """The error for calls that exceeded their time limit; names the worker that is stuck, if one is."""
        states = await self._states([call.rank for call in calls])
        worst = next((call for call in calls if states.get(call.rank) in LOST), calls[0])
        state = f": its process is {states[worst.rank]}" if worst.rank in states else ""
        others = len(calls) - 1
        also = f"; {others} more ranks are late too, and may be waiting for this one" if others else ""
        return self.lost(worst.rank, worst.stage, f"no answer within {limit_s:g} s{state}{also}")

    async def root_cause(
        self, error: GrpoDistError, unanswered: Mapping[Call, asyncio.Future[Any]] = MappingProxyType({})
    ) -> GrpoDistError:
        """The loss of another rank that caused `error`, or `error` itself.

        `unanswered` are calls of the same operation to other ranks that have no answer yet, with their futures.
        """
        if not isinstance(error, WorkerError) or isinstance(error, OutOfMemory) or len(self) == 1:
            return error
        states = await self._states([rank for rank in range(len(self)) if rank != error.rank])
        # NCCL kills the process of a rank that waited too long, so other ranks may be dead for the same reason
        culprits = ("stopped",) if isinstance(error, WorkerLost) else LOST
        lost = None
        if gone := [rank for rank, state in states.items() if state in culprits]:
            lost = self.lost(gone[0], error.stage, f"its process is {states[gone[0]]}")
        elif any(text in error.message for text in _COLLECTIVE_ERRORS) and unanswered:
            _, waiting = await asyncio.wait(unanswered.values(), timeout=COLLECTIVE_GRACE_S)
            if hung := [call for call, value in unanswered.items() if value in waiting]:
                more = len(hung) - 1
                others = f"; nor did {more} other ranks, one of which may be the cause" if more else ""
                state = states.get(hung[0].rank, "unknown")
                why = f"it did not join a collective operation in which rank {error.rank} waited (its process: {state})"
                lost = self.lost(hung[0].rank, hung[0].stage, why + others)
        if lost is None:
            return error
        lost.add_note(f"first error: {error}")
        return lost

    async def _states(self, ranks: Sequence[int]) -> dict[int, str]:
        addresses = self.addresses
        known = {rank: addresses[rank] for rank in ranks if rank in addresses}
        return await asyncio.to_thread(process_states, known)

    async def end(self) -> None:
        """Kill all processes at once and cancel all waits for their answers."""
        for handle, waits in zip(self.handles, self._waits, strict=True):
            if handle is not None:
                ray.kill(handle)
            for wait in waits:
                wait.cancel()

    kill = blocking(end)
