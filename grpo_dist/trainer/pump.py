"""The rollout pump: every group flows on as soon as it is generated.

A group (the n responses to one prompt) that leaves an engine goes at once to a free reward process and into the queue
of the reference. The reference takes everything that has queued up whenever it is idle, so its passes are few and
large when it is the slow part, and it works while other groups are still being generated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import RewardError, WorkerError
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.group import Call, wait_any
from grpo_dist.workers.groups import LogProbJob, PolicyGroup, RewardPool, RolloutGroup
from grpo_dist.workers.reward import Task

# How often deadlines are looked at while nothing finishes.
POLL_S = 0.5
# A reward process may have to start its scorer again in between.
SCORER_START_S = 180.0


@dataclass(frozen=True)
class GroupRequest:
    """One prompt to sample for: its group id, token ids, sampling, what the reward function is told, and whether the
    reference's log-probs are wanted (if there is a reference).
    """

    uid: str
    token_ids: np.ndarray
    sampling: SamplingSettings
    task: Task
    needs_ref: bool = True


@dataclass
class Pumped:
    """What came out of a run of the pump.

    Attributes:
        groups: a handle for each request, in order.
        timings: the seconds until the last group was generated (`gen`) and scored (`reward`), and those that the
            reference took beyond that (`ref`).
        failures: why responses could not be scored, a text for each.
    """

    groups: list[DataProtoRef]
    timings: dict[str, float]
    failures: list[str]


class RolloutPump:
    """Generates, scores and, with a reference, computes its log-probs.

    Args:
        rollout: the engines.
        reward: the reward processes.
        ref: the reference, or None where no KL term needs it.
        reward_timeout_s: seconds one response may take to score. The reward process sees to that; here it bounds how
            long that process itself may be silent.
        max_failure_rate: share of the responses of a run that the reward function may fail on.
        generate_timeout_s: seconds one group may take to be generated.
    """

    def __init__(
        self,
        rollout: RolloutGroup,
        reward: RewardPool,
        ref: PolicyGroup | None,
        *,
        reward_timeout_s: float,
        generate_timeout_s: float,
        max_failure_rate: float = 0.0,
    ) -> None:
        self.rollout, self.reward, self.ref = rollout, reward, ref
        self.reward_timeout_s, self.generate_timeout_s = reward_timeout_s, generate_timeout_s
        self.max_failure_rate = max_failure_rate

    def run(self, requests: Sequence[GroupRequest]) -> Pumped:
        """Sample and score all requests.

        Raises:
            GrpoDistError: a worker failed; RewardError if too many responses could not be scored.
        """
        flow = _Flow(self, requests)
        while not flow.finished:
            flow.dispatch()
            for call in wait_any(flow.in_flight, POLL_S):
                flow.collect(call)
            flow.check_deadlines()
        return Pumped(flow.results(), flow.timings, flow.failures)


class _Flow:
    """The state of one `RolloutPump.run`; groups are known by their position in `requests`."""

    def __init__(self, pump: RolloutPump, requests: Sequence[GroupRequest]) -> None:
        self.pump, self.requests = pump, requests
        self.started = time.perf_counter()
        self.timings: dict[str, float] = {}
        self.generating: dict[Call, int] = {
            pump.rollout.submit(r.uid, r.token_ids, r.sampling, r.task): i for i, r in enumerate(requests)
        }
        self.scoring: dict[Call, int] = {}
        self.to_score: deque[int] = deque()
        self.to_ref: list[int] = []
        self.ref_job: tuple[LogProbJob, list[int]] | None = None
        self.groups: dict[int, DataProtoRef] = {}
        self.scores: dict[int, DataProtoRef] = {}
        self.ref_log_probs: dict[int, DataProtoRef] = {}
        self.failures: list[str] = []

    @property
    def finished(self) -> bool:
        """Whether every group has everything."""
        with_ref = sum(request.needs_ref for request in self.requests) if self.pump.ref is not None else 0
        return len(self.scores) == len(self.requests) and len(self.ref_log_probs) == with_ref

    @property
    def in_flight(self) -> list[Call]:
        """All calls being waited for."""
        ref_calls = self.ref_job[0].calls if self.ref_job else []
        return [*self.generating, *self.scoring, *ref_calls]

    def dispatch(self) -> None:
        """Give idle workers what has queued up."""
        while self.to_score and self.pump.reward.has_free:
            i = self.to_score.popleft()
            self.scoring[self.pump.reward.submit(self.groups[i], self.requests[i].task)] = i
        if self.pump.ref is not None and self.ref_job is None and self.to_ref:
            queued, self.to_ref = self.to_ref, []
            batch = DataProtoRef.concat([self.groups[i] for i in queued])
            self.ref_job = (self.pump.ref.submit_log_probs("ref_log_prob", batch), queued)

    def collect(self, call: Call) -> None:
        """Take in what a finished call returned."""
        elapsed = time.perf_counter() - self.started
        if call in self.generating:
            i = self.generating.pop(call)
            self.groups[i] = self.pump.rollout.collect(call)
            self.to_score.append(i)
            if self.requests[i].needs_ref:
                self.to_ref.append(i)
            self.timings["gen"] = elapsed
        elif call in self.scoring:
            self.scores[self.scoring.pop(call)], failures = self.pump.reward.collect(call)
            self.failures += failures
            self._check_failures()
            self.timings["reward"] = elapsed
        elif self.ref_job is not None and self.pump.ref is not None:
            job, queued = self.ref_job
            merged = self.pump.ref.collect_log_probs(job)  # the other ranks finish together with this one
            parts = merged.split([len(self.groups[i]) for i in queued])
            self.ref_log_probs.update(zip(queued, parts, strict=True))
            self.ref_job = None
            self.timings["ref"] = max(elapsed - self.timings["gen"], 0.0)

    def check_deadlines(self) -> None:
        """Raise for calls that have been running for too long."""
        for call in self.generating:
            call.check_deadline(self.pump.generate_timeout_s)
        for call, i in self.scoring.items():
            request = self.requests[i]
            limit = self.pump.reward_timeout_s * (request.sampling.n + 1) + SCORER_START_S
            try:
                call.check_deadline(limit)
            except WorkerError as error:
                raise RewardError(
                    f"the reward process did not answer for prompt {request.uid} (data_source "
                    f"{request.task.data_source!r}): {error}"
                ) from None

    def _check_failures(self) -> None:
        total, rate = sum(request.sampling.n for request in self.requests), self.pump.max_failure_rate
        if len(self.failures) > rate * total:
            raise RewardError(
                f"{len(self.failures)} of {total} responses could not be scored, more than "
                f"reward.max_failure_rate={rate:g} allows; the first of them:\n{self.failures[0]}"
            )

    def results(self) -> list[DataProtoRef]:
        """All groups, with scores and reference log-probs, in the order of the requests."""
        groups = [self.groups[i].union(self.scores[i]) for i in range(len(self.requests))]
        return [g.union(self.ref_log_probs[i]) if i in self.ref_log_probs else g for i, g in enumerate(groups)]
