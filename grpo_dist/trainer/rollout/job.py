"""Groups that were asked of the rollout pump together, and what has become of them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.rollout_group import GroupRequest


@dataclass
class RolloutJob:
    """Groups that were asked for together; they are known by their positions in `requests`.

    Attributes:
        requests: what was asked for.
        groups: handles of what was generated.
        scores: handles of the scores.
        log_probs: by source of log-probs, handles of its log-probs.
        cancelled: groups that are not wanted any more.
        timings: seconds from the first prompt sent until the last group was generated (`gen`) and scored (`reward`),
            and those that log-probs took beyond that (`ref`, `old_log_prob`).
        failures: why responses could not be scored, a text for each.
        flows: by position, what generates and scores a group that is not there from the beginning.
        passes: what computes log-probs.
    """

    requests: Sequence[GroupRequest]
    groups: dict[int, DataProtoRef] = field(default_factory=dict)
    scores: dict[int, DataProtoRef] = field(default_factory=dict)
    log_probs: dict[str, dict[int, DataProtoRef]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    timings: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    flows: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    passes: list[asyncio.Task[None]] = field(default_factory=list)
    _started: float | None = None

    async def finished(self) -> None:
        """Wait until every group that is not cancelled has everything.

        Raises:
            GrpoDistError: a worker failed; RewardError if too many responses could not be scored.
        """
        if tasks := [*self.flows.values(), *self.passes]:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                if not task.cancelled():
                    task.result()

    async def scored(self, enough: Callable[[], bool]) -> None:
        """Wait until there are enough scores, or all.

        Raises:
            GrpoDistError: as `finished`.
        """
        if enough():
            return
        for flow in asyncio.as_completed(self.flows.values()):
            await flow
            if enough():
                return

    def cancel(self, groups: Iterable[int]) -> None:
        """End the work on those of these groups that have no scores yet."""
        late = [i for i in groups if i not in self.scores]
        self.cancelled.update(late)
        for i in late:
            if i in self.flows:
                self.flows[i].cancel()

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

    def begin(self) -> None:
        """A prompt is sent; from the first one on `timings` count."""
        self._started = time.perf_counter() if self._started is None else self._started

    def note(self, kind: str, since: float = 0.0) -> None:
        """The last work of its kind is done now, as far as is known."""
        elapsed = 0.0 if self._started is None else time.perf_counter() - self._started
        self.timings[kind] = max(elapsed - since, 0.0)


def timings(jobs: Sequence[RolloutJob]) -> dict[str, float]:
    """Seconds by kind of work, summed over jobs that ran one after the other."""
    names = dict.fromkeys(name for job in jobs for name in job.timings)
    return {name: math.fsum(job.timings.get(name, 0.0) for job in jobs) for name in names}
