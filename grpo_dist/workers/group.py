"""WorkerGroup: the processes of one role. The only place where Ray actors are made and awaited.

A worker is a plain class; `spawn` runs one instance of it in each process. Calls return values in rank order. Whatever
goes wrong in a worker comes out as one `GrpoDistError`: an error of ours as it is, anything else as a `WorkerError`
with role, rank, node and stage. The first failure ends the wait: other ranks may never answer once a peer is gone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError, UnserializableException
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_dist.errors import GrpoDistError, WorkerError
from grpo_dist.workers.resources import Bundle

# A RayTaskError's text holds the remote traceback; this much of its end is kept.
TRACEBACK_CHARS = 4000


@dataclass(frozen=True)
class Call:
    """A call in flight: who was asked to do what, since when."""

    ref: ray.ObjectRef
    group: WorkerGroup
    rank: int
    stage: str
    started: float

    def result(self) -> Any:
        """The value of a finished call.

        Raises:
            GrpoDistError: the call failed, or its worker died.
        """
        return self.group.resolve(self)

    def check_deadline(self, limit_s: float) -> None:
        """Raise if the call has been running for longer than `limit_s` seconds.

        Raises:
            WorkerError: it has.
        """
        if time.monotonic() - self.started > limit_s:
            raise self.group.error(self.rank, self.stage, f"no answer within {limit_s:g} s")


def wait_any(calls: Sequence[Call], timeout_s: float) -> list[Call]:
    """The calls that have finished; waits up to `timeout_s` seconds for the first one."""
    by_ref = {call.ref: call for call in calls}
    done, _ = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s)
    return [by_ref[ref] for ref in done]


class WorkerGroup:
    """The workers of one role.

    Args:
        role: "actor", "rollout", "ref" or "reward".
        handles: one Ray actor handle per rank.
        timeout_s: seconds without an answer after which a worker counts as hung.
    """

    def __init__(self, role: str, handles: Sequence[Any], timeout_s: float) -> None:
        self.role, self.handles, self.timeout_s = role, list(handles), timeout_s
        self.nodes = ["?"] * len(self.handles)

    @classmethod
    def spawn(
        cls,
        role: str,
        worker_class: type,
        bundles: Sequence[Bundle],
        *,
        args: Sequence[tuple[Any, ...]],
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        max_concurrency: int = 1,
    ) -> WorkerGroup:
        """Start one process per bundle; rank i is built with `worker_class(*args[i])`. Returns without waiting."""
        remote_class: Any = ray.remote(worker_class)
        handles = []
        for bundle, arguments in zip(bundles, args, strict=True):
            options = remote_class.options(
                num_cpus=bundle.num_cpus,
                num_gpus=bundle.num_gpus,
                max_concurrency=max_concurrency,
                max_restarts=0,
                runtime_env={"env_vars": dict(env)} if env else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(bundle.group, bundle.index),
            )
            handles.append(options.remote(*arguments))
        return cls(role, handles, timeout_s)

    def __len__(self) -> int:
        return len(self.handles)

    def submit(self, rank: int, stage: str, method: str, *args: Any) -> Call:
        """Call a method on one worker, without waiting."""
        ref = getattr(self.handles[rank], method).remote(*args)
        return Call(ref, self, rank, stage, time.monotonic())

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
        limit = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        waiting = {call.ref: call for call in calls}
        values: dict[ray.ObjectRef, Any] = {}
        while waiting:
            left = max(deadline - time.monotonic(), 0)
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
            if not done:
                late = next(iter(waiting.values()))
                raise self.error(late.rank, late.stage, f"no answer within {limit:g} s")
            call = waiting.pop(done[0])
            values[call.ref] = self.resolve(call)
        return [values[call.ref] for call in calls]

    def resolve(self, call: Call) -> Any:
        """The value of a finished call; see `Call.result`."""
        try:
            return ray.get(call.ref, timeout=self.timeout_s)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, GrpoDistError):
                raise cause from None
            text = f"{type(cause).__name__}: {cause}" if cause is not None else str(error).strip().splitlines()[-1]
            raise self.error(call.rank, call.stage, text, str(error)[-TRACEBACK_CHARS:]) from None
        except RayActorError as error:
            raise self.error(call.rank, call.stage, f"its process died ({_cause_of_death(error)})") from None
        except UnserializableException as error:  # its text ends with the original traceback
            text = str(error).strip()
            raise self.error(call.rank, call.stage, text.splitlines()[-1], text[-TRACEBACK_CHARS:]) from None
        except GetTimeoutError:
            raise self.error(call.rank, call.stage, f"no answer within {self.timeout_s:g} s") from None
        except RayError as error:
            raise self.error(call.rank, call.stage, f"{type(error).__name__}: {str(error).splitlines()[0]}") from None

    def error(self, rank: int, stage: str, message: str, remote_traceback: str = "") -> WorkerError:
        """A WorkerError of one of these workers."""
        return WorkerError(message, self.role, rank, self.nodes[rank], stage, remote_traceback)

    def kill(self) -> None:
        """End all processes at once."""
        for handle in self.handles:
            ray.kill(handle)


def _cause_of_death(error: RayActorError) -> str:
    """What Ray's report says about why: its exit detail, up to the general advice."""
    if error.actor_init_failed:  # the report ends with the constructor's traceback
        return str(error).strip().splitlines()[-1]
    report = " ".join(str(error).split())
    _, _, detail = report.rpartition("Worker exit detail: ")
    return (detail or report).partition("Some common causes")[0].strip()[:300]
