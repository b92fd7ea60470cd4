"""What is asked of the rollout pump, and what has become of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.reward import Task


@dataclass(frozen=True)
class GroupRequest:
    """One prompt to sample for: its group id, token ids, sampling, what the reward function is told, and whether
    log-probs of it are wanted (of whoever gives them for its job).
    """

    uid: str
    token_ids: np.ndarray
    sampling: SamplingSettings
    task: Task
    needs_log_probs: bool = True


@dataclass
class LogProbPass:
    """Some groups of a job whose log-probs are computed together, once all of them are generated."""

    groups: list[int]
    queued: bool = False
    done: bool = False


@dataclass
class RolloutJob:
    """Groups that were asked for together; they are known by their positions in `requests`.

    Attributes:
        requests: what was asked for.
        passes: by giver of log-probs.
        groups: handles of what was generated.
        scores: handles of the scores.
        log_probs: by giver, handles of its log-probs.
        cancelled: groups that are not wanted any more.
        timings: seconds from the first prompt sent until the last group was generated (`gen`) and scored (`reward`),
            and those that log-probs took beyond that (`ref`, `old_log_prob`).
        failures: why responses could not be scored, a text for each.
    """

    requests: Sequence[GroupRequest]
    passes: dict[str, list[LogProbPass]]
    groups: dict[int, DataProtoRef] = field(default_factory=dict)
    scores: dict[int, DataProtoRef] = field(default_factory=dict)
    log_probs: dict[str, dict[int, DataProtoRef]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    timings: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    started: float | None = None

    @property
    def done(self) -> bool:
        """Whether every group that was not cancelled has everything."""
        return len(self.scores) + len(self.cancelled) == len(self.requests) and self.done_passes

    @property
    def done_passes(self) -> bool:
        """Whether all log-probs are there."""
        return all(part.done for parts in self.passes.values() for part in parts)

    def results(self) -> list[DataProtoRef]:
        """All groups with everything, in the order of the requests, less the cancelled ones."""
        results = []
        for i in sorted(self.scores):
            group = self.groups[i].union(self.scores[i])
            for found in self.log_probs.values():
                group = group.union(found[i]) if i in found else group
            results.append(group)
        return results

    def release(self, groups: Iterable[int]) -> None:
        """Let go of groups that are not wanted any more, so that the object store can free them. The job must be done:
        a pass that is not over needs all of its groups.
        """
        for i in groups:
            self.cancelled.add(i)
            for found in (self.groups, self.scores, *self.log_probs.values()):
                found.pop(i, None)

    def elapsed(self) -> float:
        """Seconds since its first prompt was sent."""
        return 0.0 if self.started is None else time.perf_counter() - self.started


def timings(jobs: Sequence[RolloutJob]) -> dict[str, float]:
    """Seconds by kind of work, summed over jobs that ran one after the other."""
    names = dict.fromkeys(name for job in jobs for name in job.timings)
    return {name: math.fsum(job.timings.get(name, 0.0) for job in jobs) for name in names}
