"""The rollout pump: every group flows on as soon as it is generated.

A group (the n responses to one prompt) goes to an engine that has room, then at once to a free reward process, and
into the next pass of the reference and, where the batch needs old log-probs and the policy stands still, of the actor.
Those passes take fixed shares of a job, so that a run computes the same sums however its groups come in.

The pump is the background of all that the driver waits for: groups for coming steps move on during an update. It is
also the ledger of the prompts: each group of a job is queued, in flight on one worker, there, or cancelled. What was
in flight on a worker that failed is queued again, at its old place.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo_dist.errors import GrpoDistError, RewardError, WorkerLost
from grpo_dist.trainer.log_prob_passes import Giver, PassQueue
from grpo_dist.trainer.rollout_job import GroupRequest, LogProbPass, RolloutJob
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.group import POLL_S, Call, WorkerGroup, finished
from grpo_dist.workers.reward_pool import RewardPool
from grpo_dist.workers.rollout_group import RolloutGroup

# A reward process may have to start its scorer before the first response, while others start beside it.
SCORER_START_S = 180.0
# A response on which the reward function hangs ends its scorer, and another one is started for the next: on every
# response of a group, if need be. What that loads was loaded a moment ago, so it is faster than the first time; and the
# longer it may take, the later a reward process that is itself stuck is noticed.
SCORER_RESTART_S = 20.0
# Log-probs of a job are computed in this many passes: enough to overlap with generation, few enough to be large.
LOG_PROB_PASSES = 4


class RolloutPump:
    """Generates, scores and has log-probs computed; `workers.group.Background` of the run.

    Args:
        rollout: the engines.
        reward: the reward processes.
        givers: by name (`ref`, `old_log_prob`), who computes log-probs of groups while others are generated.
        reward_timeout_s: seconds one response may take to score. The reward process sees to that; here it bounds how
            long that process itself may be silent.
        max_failure_rate: share of the responses of a job that the reward function may fail on.
    """

    def __init__(
        self,
        rollout: RolloutGroup,
        reward: RewardPool,
        givers: Mapping[str, Giver],
        *,
        reward_timeout_s: float,
        max_failure_rate: float = 0.0,
    ) -> None:
        self.rollout, self.reward = rollout, reward
        self.reward_timeout_s, self.max_failure_rate = reward_timeout_s, max_failure_rate
        self.on_progress: Callable[[], None] = lambda: None
        self._givers = {name: PassQueue(name, giver) for name, giver in givers.items()}
        self._next_check = 0.0
        self._order = itertools.count()
        self._queue: list[_Place] = []
        self._generating: dict[Call, _Place] = {}
        self._to_score: deque[tuple[RolloutJob, int]] = deque()
        self._scoring: dict[Call, tuple[RolloutJob, int]] = {}

    def submit(
        self,
        requests: Sequence[GroupRequest],
        *,
        givers: Iterable[str] = (),
        first: bool = False,
        there: Mapping[int, tuple[DataProtoRef, DataProtoRef]] | None = None,
    ) -> RolloutJob:
        """Ask for groups, without waiting.

        Args:
            requests: what to sample.
            givers: who computes log-probs of those that want them.
            first: before all that is queued.
            there: by position, groups and their scores that need not be sampled.
        """
        wanting = [i for i, request in enumerate(requests) if request.needs_log_probs]
        parts = np.array_split(wanting, min(LOG_PROB_PASSES, len(wanting))) if wanting else []
        passes = {name: [LogProbPass(part.tolist()) for part in parts] for name in givers if name in self._givers}
        job = RolloutJob(requests, passes, log_probs={name: {} for name in passes})
        for i in range(len(requests)):
            if there and i in there:
                job.groups[i], job.scores[i] = there[i]
            else:
                heapq.heappush(self._queue, _Place(not first, next(self._order), job, i))
        self._queue_passes(job)
        self._dispatch()
        return job

    def wait(self, done: Callable[[], bool], give_way: Callable[[], None] = lambda: None) -> None:
        """Go on until `done`.

        Args:
            done: whether to stop.
            give_way: called wherever all that has come in is taken in; may raise to end the wait.

        Raises:
            GrpoDistError: a worker failed; RewardError if too many responses could not be scored.
        """
        while not done():
            give_way()
            self.rollout.catch_up()  # the actor stands still: whoever waits here does not train
            if not self.in_flight:
                self.tick()
            if not (self.in_flight or done()):
                raise GrpoDistError("nothing is in flight and groups are missing: the pump has lost track of them")
            finished((), self)

    def cancel(self, job: RolloutJob, groups: Iterable[int]) -> None:
        """End the work on groups of a job that have no scores yet."""
        job.cancelled.update(i for i in groups if i not in job.scores)
        self._queue = [place for place in self._queue if not place.cancelled]
        heapq.heapify(self._queue)
        self.rollout.abort([call for call, place in self._generating.items() if place.cancelled])
        for part in (part for parts in job.passes.values() for part in parts if not part.queued):
            part.groups = [i for i in part.groups if i not in job.cancelled]
            part.done = not part.groups
        self._queue_passes(job)
        self._dispatch()

    @contextlib.contextmanager
    def in_background(self, groups: Sequence[WorkerGroup]) -> Iterator[None]:
        """Go on whenever one of these groups is waited for."""
        for group in groups:
            group.background = self
        try:
            yield
        finally:
            for group in groups:
                group.background = None

    # --- workers.group.Background ------------------------------------------------------------------------------
    @property
    def in_flight(self) -> list[Call]:
        """All calls being waited for."""
        log_probs = [call for giver in self._givers.values() for call in giver.in_flight]
        return [*self.rollout.in_flight, *self._scoring, *self.reward.starting, *log_probs]

    def collect(self, call: Call) -> None:
        """Take in what a finished call returned."""
        if call in self._scoring:
            self._collect_scores(call)
        elif call in self.reward.starting:
            self.reward.collect(call)
        elif any(call in giver.in_flight for giver in self._givers.values()):
            for giver in self._givers.values():
                giver.collect(call)
        else:  # a group, the start of an engine, or a call of a process that was replaced a moment ago
            self._collect_group(call)

    def tick(self) -> None:
        """Look at time limits, and give idle workers what has queued up."""
        if time.monotonic() > self._next_check:
            self._next_check = time.monotonic() + POLL_S
            self._check_deadlines()
        self._dispatch()
        self.on_progress()

    # --- parts -------------------------------------------------------------------------------------------------
    def _dispatch(self) -> None:
        while self._queue and self.rollout.has_room:
            place = heapq.heappop(self._queue)
            if place.job.started is None:
                place.job.started = time.perf_counter()
            request = place.job.requests[place.index]
            call = self.rollout.submit(request.uid, request.token_ids, request.sampling, request.task)
            self._generating[call] = place
        while self._to_score and self.reward.has_free:
            job, i = self._to_score.popleft()
            if i in job.cancelled:
                continue
            self._scoring[self.reward.submit(job.groups[i], job.requests[i].task)] = job, i
        for giver in self._givers.values():
            giver.dispatch()

    def _collect_group(self, call: Call) -> None:
        group = self.rollout.collect(call)
        self._queue_lost()
        place = self._generating.pop(call, None)
        if group is None or place is None or place.cancelled:
            return
        job = place.job
        job.groups[place.index] = group
        job.timings["gen"] = job.elapsed()
        self._to_score.append((job, place.index))
        self._queue_passes(job)

    def _queue_passes(self, job: RolloutJob) -> None:
        """Queue the passes whose groups are all there."""
        for name, parts in job.passes.items():
            for part in parts:
                if not part.queued and part.groups and all(i in job.groups for i in part.groups):
                    part.queued = True
                    self._givers[name].queue.append((job, part))

    def _queue_lost(self) -> None:
        """Ask again for what was in flight on a worker that failed."""
        for call in self.rollout.take_lost():
            place = self._generating.pop(call)
            if not place.cancelled:
                heapq.heappush(self._queue, place)

    def _collect_scores(self, call: Call) -> None:
        job, i = self._scoring.pop(call)
        scored = self.reward.collect(call)
        if i in job.cancelled:
            return
        if scored is None:  # its process is being replaced
            self._to_score.appendleft((job, i))
            return
        scores, failures = scored
        job.scores[i] = scores
        job.timings["reward"] = job.elapsed()
        if failures:
            self._count_failures(job, failures)

    def _count_failures(self, job: RolloutJob, failures: Sequence[str]) -> None:
        job.failures += failures
        total, rate = sum(request.sampling.n for request in job.requests), self.max_failure_rate
        if len(job.failures) > rate * total:
            raise RewardError(
                f"{len(job.failures)} of {total} responses could not be scored, more than "
                f"reward.max_failure_rate={rate:g} allows; the first of them:\n{job.failures[0]}"
            )

    def _check_deadlines(self) -> None:
        self.rollout.check_deadlines()
        self._queue_lost()
        for giver in self._givers.values():
            giver.check_deadline()
        for call in self.reward.starting:
            if call.is_late():
                self.reward.replace(call, call.group.late([call]))
        for call, (job, i) in list(self._scoring.items()):
            limit = (self.reward_timeout_s + SCORER_RESTART_S) * job.requests[i].sampling.n + SCORER_START_S
            if call.is_late(limit):
                self._replace_scorer(call, job, i, limit)

    def _replace_scorer(self, call: Call, job: RolloutJob, i: int, limit: float) -> None:
        del self._scoring[call]
        self._to_score.appendleft((job, i))
        try:
            self.reward.replace(call, call.group.late([call], limit))
        except WorkerLost as error:
            request = job.requests[i]
            raise RewardError(
                f"the reward process did not answer for prompt {request.uid} (data_source "
                f"{request.task.data_source!r}): {error}"
            ) from None


@dataclass(order=True)
class _Place:
    """A group's place in the queue of prompts."""

    later: bool
    number: int
    job: RolloutJob = field(compare=False)
    index: int = field(compare=False)

    @property
    def cancelled(self) -> bool:
        return self.index in self.job.cancelled
