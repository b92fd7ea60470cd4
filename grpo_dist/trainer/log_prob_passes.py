"""Log-probs of groups while others are generated: passes over parts of a job, one at a time for each who gives them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_dist.errors import GrpoDistError, WorkerError
from grpo_dist.trainer.rollout_job import LogProbPass, RolloutJob
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.group import Call
from grpo_dist.workers.groups import LogProbJob, Restart


def cannot_restart(error: GrpoDistError) -> Restart:
    """A role whose loss only a checkpoint makes good.

    Raises:
        GrpoDistError: `error`.
    """
    raise error


@dataclass(frozen=True)
class Giver:
    """Who computes log-probs.

    Attributes:
        submit: begins to compute those of a batch.
        restart: begins to replace its workers after a failure, or raises it.
    """

    submit: Callable[[DataProtoRef], LogProbJob]
    restart: Callable[[GrpoDistError], Restart] = cannot_restart


class PassQueue:
    """The passes of one giver, one at a time. A pass whose worker is lost is done again by its replacement.

    Args:
        name: of the giver, as in `RolloutJob.passes`.
        giver: computes.
    """

    def __init__(self, name: str, giver: Giver) -> None:
        self.name, self.giver = name, giver
        self.queue: deque[tuple[RolloutJob, LogProbPass]] = deque()
        self._running: tuple[LogProbJob, RolloutJob, LogProbPass] | None = None
        self._restart: Restart | None = None
        self._starting: list[Call] = []
        self._started: dict[Call, Any] = {}

    @property
    def in_flight(self) -> list[Call]:
        """Calls being waited for: of the pass that runs, or of workers that start anew."""
        if self._restart is not None:
            return [call for call in self._starting if call not in self._started]
        return self._running[0].in_flight if self._running else []

    def dispatch(self) -> None:
        """Begin the next pass, if none runs."""
        if self._running is None and self._restart is None and self.queue:
            job, part = self.queue.popleft()
            batch = DataProtoRef.concat([job.groups[i] for i in part.groups])
            self._running = self.giver.submit(batch), job, part

    def collect(self, call: Call) -> None:
        """Take in a finished call.

        Raises:
            GrpoDistError: it failed, and the giver cannot be restarted.
        """
        if call not in self.in_flight:
            return
        try:
            if self._restart is not None:
                self._collect_start(call, self._restart)
            else:
                self._collect_pass(call)
        except WorkerError as error:
            others = [each for each in self.in_flight if each is not call]
            self._begin_restart(call.group.root_cause(error, others))

    def check_deadline(self) -> None:
        """Restart the giver if a pass, or its start, has taken longer than it may.

        Raises:
            WorkerLost: it cannot be restarted.
        """
        late = [call for call in self.in_flight if call.is_late()]
        if late:
            self._begin_restart(late[0].group.late(late))

    def _collect_pass(self, call: Call) -> None:
        assert self._running is not None
        log_probs, job, part = self._running
        merged = log_probs.collect(call)
        if merged is None:
            return
        handles = merged.split([len(job.groups[i]) for i in part.groups])
        job.log_probs[self.name].update(zip(part.groups, handles, strict=True))
        part.done = True
        job.timings[self.name] = max(job.elapsed() - job.timings.get("gen", 0.0), 0.0)
        self._running = None

    def _begin_restart(self, error: GrpoDistError) -> None:
        if self._running is not None:
            self.queue.appendleft(self._running[1:])
            self._running = None
        self._restart = self.giver.restart(error)
        self._starting, self._started = next(self._restart), {}

    def _collect_start(self, call: Call, restart: Restart) -> None:
        self._started[call] = call.result()
        if len(self._started) < len(self._starting):
            return
        try:
            self._starting, self._started = restart.send([self._started[each] for each in self._starting]), {}
        except StopIteration:
            self._restart = None
