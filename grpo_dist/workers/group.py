"""WorkerGroup: the processes of one role. The only place where Ray actors are made and awaited.

A worker is a plain class; `spawn` runs one instance of it in each process. Calls return values in rank order. Whatever
goes wrong in a worker comes out as one `GrpoDistError`: an error of ours as it is, anything else as a `WorkerError`
with role, rank, node and stage; a `WorkerLost` if the process died or does not answer. The first failure ends the wait:
other ranks may never answer once a peer is gone. Where the loss of one rank shows as an error of another (a broken
connection, a collective operation that it did not come to), or makes all of them late, the one that is lost is named.

Every wait of the driver is `finished`, and while it waits for one thing the `Background` goes on: groups of responses
move from role to role during an update.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    UnserializableException,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_dist.errors import GrpoDistError, OutOfMemory, WorkerError, WorkerLost
from grpo_dist.workers.batch_ref import DataProtoRef, Label
from grpo_dist.workers.busy import BusyClock
from grpo_dist.workers.environment import in_environment
from grpo_dist.workers.limits import TimeLimits
from grpo_dist.workers.probe import LOST, probe
from grpo_dist.workers.process import Address
from grpo_dist.workers.resources import Bundle

# A RayTaskError's text holds the remote traceback; this much of its end is kept.
TRACEBACK_CHARS = 4000
# Ray sends results up to 100 kB back with the reply, to the driver's memory. Data is not for the driver: a worker with
# this in its environment leaves all but short answers in the object store.
DATA_STAYS_IN_STORE = {"RAY_max_direct_call_object_size": "4096"}
# A new process imports torch, transformers or vLLM before it answers, and others do so beside it.
PROCESS_START_S = 600.0
# How often a wait looks at its time limits while nothing finishes.
POLL_S = 0.5
# Ranks that wait in the same collective operation fail within moments of each other; a rank that does not answer for so
# long after the first failure is the one that they waited for.
COLLECTIVE_GRACE_S = 10.0
# What the messages of gloo and NCCL contain, and those of no other error.
_COLLECTIVE_ERRORS = ("gloo/transport/", "gloo/rendezvous/", "ProcessGroupNCCL", "NCCL error", "NCCL communicator")


@dataclass(frozen=True)
class Call:
    """A call in flight: who was asked to do what, since when. `process` is the actor handle that was asked, `data` what
    it returns besides its answer (see `WorkerGroup.submit_for_data`).
    """

    ref: ray.ObjectRef
    group: WorkerGroup
    rank: int
    stage: str
    started: float
    process: Any = None
    data: ray.ObjectRef | None = None
    is_timed: bool = True

    def result(self) -> Any:
        """The value of a finished call.

        Raises:
            GrpoDistError: the call failed, or its worker died.
        """
        return self.group.resolve(self)

    def handle(self, label: Label) -> DataProtoRef:
        """The handle of the data that came with the answer."""
        assert self.data is not None, "only `submit_for_data` asks for data"
        return DataProtoRef.stored(self.data, label)

    @property
    def limit_s(self) -> float:
        """Seconds it may take."""
        return self.group.limits.of(self.stage)

    def is_late(self, limit_s: float | None = None) -> bool:
        """Whether it has been running for longer than `limit_s` seconds, or else than it may."""
        return time.monotonic() - self.started > (self.limit_s if limit_s is None else limit_s)


class Background(Protocol):
    """What goes on while the driver waits for something else. It never waits itself."""

    @property
    def in_flight(self) -> list[Call]:
        """Its calls."""

    def collect(self, call: Call) -> None:
        """Take in one of them that has finished, and start what follows from it."""

    def tick(self) -> None:
        """Look at time limits and queues."""


def finished(calls: Sequence[Call], background: Background | None, timeout_s: float = POLL_S) -> list[Call]:
    """Those of `calls` that have finished; waits up to `timeout_s` seconds for one of them or of the background's."""
    others = background.in_flight if background is not None else []
    by_ref = {call.ref: call for call in (*calls, *others)}
    done: Sequence[ray.ObjectRef] = ()
    if by_ref:
        done, _ = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s, fetch_local=False)
    if done:  # what else is there already comes along: one look at many calls costs as much as at one
        done, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0, fetch_local=False)
    mine = set(calls)
    if background is not None:
        for ref in done:
            if by_ref[ref] not in mine:
                background.collect(by_ref[ref])
        background.tick()
    return [by_ref[ref] for ref in done if by_ref[ref] in mine]


class WorkerGroup:
    """The workers of one role.

    Attributes:
        background: what goes on while this group is waited for.

    Args:
        role: "actor", "rollout", "ref" or "reward".
        handles: one Ray actor handle per rank.
        limits: seconds without an answer after which a worker counts as hung, by stage.
        make: by rank, what makes a new process in place of one that is gone.
    """

    def __init__(
        self, role: str, handles: Sequence[Any], limits: TimeLimits, make: Sequence[Callable[[], Any]] = ()
    ) -> None:
        self.role, self.handles, self.limits = role, list(handles), limits
        self._addresses: dict[int, Address] = {}
        self._expected: dict[int, ray.ObjectRef] = {}  # addresses of new processes that may not be up yet, by rank
        self.background: Background | None = None
        self._make = list(make)
        self._busy = [BusyClock() for _ in self.handles]

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
        """Start one process per bundle; rank i is built with `worker_class(*args[i])`. Returns without waiting.

        `env` are variables that a process must have when it starts (Ray logs them: no secrets), `shared` those that are
        set before the constructor runs (environment.py).
        """
        remote_class: Any = ray.remote(in_environment(worker_class))
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
        return cls(role, [start() for start in make], limits, make)

    def respawn(self, rank: int) -> None:
        """End a worker's process, if it still lives, and start a new one in its place, without waiting."""
        ray.kill(self.handles[rank])
        self._addresses.pop(rank, None)
        self.handles[rank] = self._make[rank]()
        self._expected[rank] = self.handles[rank].address.remote()  # it answers this as soon as it is up
        self._busy[rank] = BusyClock(self._busy[rank].seconds)

    def busy_seconds(self) -> float:
        """Seconds that the workers, taken together, have had something to do so far."""
        return sum(clock.seconds for clock in self._busy)

    def __len__(self) -> int:
        return len(self.handles)

    @property
    def addresses(self) -> dict[int, Address]:
        """Where the processes are, by rank; those of new processes once they are up."""
        refs = {ref: rank for rank, ref in self._expected.items()}
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0) if refs else ([], [])
        for ref in done:
            del self._expected[refs[ref]]
            with contextlib.suppress(RayError):  # that process is gone too
                self._addresses[refs[ref]] = ray.get(ref)
        return self._addresses

    def call_home(self) -> list[Address]:
        """Wait until every process is there, and note where."""
        limit = max(self.limits.of("start"), PROCESS_START_S)
        return self.note_addresses(self.gather(self.submit_all("start", "address"), timeout_s=limit))

    def note_addresses(self, addresses: Sequence[Address]) -> list[Address]:
        """Note where the processes are, in rank order."""
        self._addresses, self._expected = dict(enumerate(addresses)), {}
        return list(addresses)

    def submit(self, rank: int, stage: str, method: str, *args: Any, timed: bool = True) -> Call:
        """Call a method on one worker, without waiting; `timed` if it counts as something to do."""
        handle = self.handles[rank]
        if timed:
            self._busy[rank].begin()
        return Call(getattr(handle, method).remote(*args), self, rank, stage, time.monotonic(), handle, is_timed=timed)

    def submit_for_data(self, rank: int, stage: str, method: str, *args: Any) -> Call:
        """Call a method that returns (answer, data), without waiting.

        `Call.data` refers to the data, which stays in the object store. Unlike what a worker puts there itself it
        outlives the worker: it belongs to this process.
        """
        handle = self.handles[rank]
        self._busy[rank].begin()
        answer, data = getattr(handle, method).options(num_returns=2).remote(*args)
        return Call(answer, self, rank, stage, time.monotonic(), handle, data)

    def tell(self, rank: int, method: str, *args: Any) -> None:
        """Call a method whose answer nobody waits for."""
        getattr(self.handles[rank], method).remote(*args)

    def call(self, rank: int, stage: str, method: str, *args: Any) -> Any:
        """Call a method on one worker and wait."""
        return self.gather([self.submit(rank, stage, method, *args)])[0]

    def submit_all(self, stage: str, method: str, *args: Any) -> list[Call]:
        """Call a method with the same arguments on every worker, without waiting."""
        return [self.submit(rank, stage, method, *args) for rank in range(len(self))]

    def call_all(self, stage: str, method: str, *args: Any) -> list[Any]:
        """Call a method with the same arguments on every worker; values in rank order."""
        return self.gather(self.submit_all(stage, method, *args))

    def call_each(self, stage: str, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method on every worker, each with arguments of its own; values in rank order."""
        return self.gather([self.submit(rank, stage, method, *a) for rank, a in enumerate(args)])

    def gather(self, calls: Sequence[Call], timeout_s: float | None = None) -> list[Any]:
        """Wait for all calls; values in the order of `calls`.

        Raises:
            GrpoDistError: the first failure of any of them, or no answer in time.
        """
        values = {}
        for call, value in self._outcomes(calls, timeout_s):
            if isinstance(value, GrpoDistError):
                others = [each for each in calls if each.group is call.group and each.ref not in values]
                raise call.group.root_cause(value, [each for each in others if each is not call])
            values[call.ref] = value
        return [values[call.ref] for call in calls]

    def settle(self, calls: Sequence[Call]) -> list[Any]:
        """Wait until every call has a value or has failed; values and errors in the order of `calls`."""
        values = {call.ref: value for call, value in self._outcomes(calls, None)}
        return [values[call.ref] for call in calls]

    def _outcomes(self, calls: Sequence[Call], timeout_s: float | None) -> Iterator[tuple[Call, Any]]:
        """Each call with its value or error, as they finish; a call that is late has failed."""
        limit = max((call.limit_s for call in calls), default=0.0) if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        waiting = dict.fromkeys(calls)
        while waiting:
            left = deadline - time.monotonic()
            done = finished(list(waiting), self.background, min(max(left, 0), POLL_S))
            if not done and left <= 0:
                group = next(iter(waiting)).group
                late = [call for call in waiting if call.group is group]
                lost = group.late(late, limit)
                call = next(call for call in late if call.rank == lost.rank)
                del waiting[call]
                yield call, lost
            for call in done:
                del waiting[call]
                try:
                    yield call, call.result()
                except GrpoDistError as error:
                    yield call, error

    def resolve(self, call: Call) -> Any:
        """The value of a finished call; see `Call.result`."""
        if call.is_timed and call.process is self.handles[call.rank]:
            self._busy[call.rank].end()
        try:
            return ray.get(call.ref, timeout=call.limit_s)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, WorkerError):
                cause.locate(self.role, call.rank, self._node(call.rank), call.stage)
            if isinstance(cause, GrpoDistError):
                raise cause from None
            text = f"{type(cause).__name__}: {cause}" if cause is not None else str(error).strip().splitlines()[-1]
            raise self.error(call.rank, call.stage, text, str(error)[-TRACEBACK_CHARS:]) from None
        except (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError) as error:
            tell = self.error if getattr(error, "actor_init_failed", False) else self.lost  # it would fail again
            raise tell(call.rank, call.stage, f"its process died ({_cause_of_death(error)})") from None
        except UnserializableException as error:  # its text ends with the original traceback
            text = str(error).strip()
            raise self.error(call.rank, call.stage, text.splitlines()[-1], text[-TRACEBACK_CHARS:]) from None
        except GetTimeoutError:
            raise self.lost(call.rank, call.stage, f"its answer did not come within {call.limit_s:g} s") from None
        except RayError as error:
            raise self.error(call.rank, call.stage, f"{type(error).__name__}: {str(error).splitlines()[0]}") from None

    def error(self, rank: int, stage: str, message: str, remote_traceback: str = "") -> WorkerError:
        """A WorkerError of one of these workers."""
        return WorkerError(message, self.role, rank, self._node(rank), stage, remote_traceback)

    def lost(self, rank: int, stage: str, message: str) -> WorkerLost:
        """A WorkerLost of one of these workers."""
        return WorkerLost(message, self.role, rank, self._node(rank), stage)

    def _node(self, rank: int) -> str:
        address = self.addresses.get(rank)
        return "?" if address is None else address.host

    def late(self, calls: Sequence[Call], limit_s: float | None = None) -> WorkerLost:
        """What to say of these workers' calls that were not answered in time: names the one that is stuck."""
        limit_s = calls[0].limit_s if limit_s is None else limit_s
        states = self._states([call.rank for call in calls])
        worst = next((call for call in calls if states.get(call.rank) in LOST), calls[0])
        state = f": its process is {states[worst.rank]}" if worst.rank in states else ""
        others = len(calls) - 1
        also = f"; ranks that are late too, and may wait for it: {others}" if others else ""
        return self.lost(worst.rank, worst.stage, f"no answer within {limit_s:g} s{state}{also}")

    def root_cause(self, error: GrpoDistError, unanswered: Sequence[Call] = ()) -> GrpoDistError:
        """`error`, or, if it is one rank's and another rank is gone or hangs, the loss of that one.

        Args:
            error: what came out first.
            unanswered: the calls of other ranks for the same that have no answer yet.
        """
        if not isinstance(error, WorkerError) or isinstance(error, OutOfMemory) or len(self) == 1:
            return error
        states = self._states([rank for rank in range(len(self)) if rank != error.rank])
        # NCCL ends the process of a rank that has waited too long: others may be dead for the same reason
        culprits = ("stopped",) if isinstance(error, WorkerLost) else LOST
        lost = None
        if gone := [rank for rank, state in states.items() if state in culprits]:
            lost = self.lost(gone[0], error.stage, f"its process is {states[gone[0]]}")
        elif any(text in error.message for text in _COLLECTIVE_ERRORS) and (hung := _still_unanswered(unanswered)):
            others = f"; so did {len(hung) - 1} more, of which one may be the cause" if len(hung) > 1 else ""
            state = states.get(hung[0].rank, "unknown")
            why = f"it did not come to an operation in which rank {error.rank} waited for it (its process: {state})"
            lost = self.lost(hung[0].rank, hung[0].stage, why + others)
        if lost is None:
            return error
        lost.add_note(f"it showed as: {error}")
        return lost

    def _states(self, ranks: Sequence[int]) -> dict[int, str]:
        addresses = self.addresses
        return probe({rank: addresses[rank] for rank in ranks if rank in addresses})

    def kill(self) -> None:
        """End all processes at once."""
        for handle in self.handles:
            ray.kill(handle)


def _still_unanswered(calls: Sequence[Call]) -> list[Call]:
    """Those without an answer when others in the same operation have failed too."""
    deadline, waiting = time.monotonic() + COLLECTIVE_GRACE_S, list(calls)
    while waiting and (left := deadline - time.monotonic()) > 0:
        done = finished(waiting, None, min(left, POLL_S))
        waiting = [call for call in waiting if call not in done]
    return waiting


def _cause_of_death(error: RayError) -> str:
    """What Ray's report says about why: its exit detail, up to the general advice."""
    if getattr(error, "actor_init_failed", False):  # the report ends with the constructor's traceback
        return str(error).strip().splitlines()[-1]
    report = " ".join(str(error).split())
    _, _, detail = report.rpartition("Worker exit detail: ")
    return (detail or report).partition("Some common causes")[0].strip()[:300]
