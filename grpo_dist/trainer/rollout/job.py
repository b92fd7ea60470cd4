"""A job of the rollout pump: groups that were requested together and their results so far.

Its seeds depend on what is sampled, not on who samples it. Dynamic sampling (`algorithm.filter_groups`) keeps the
groups whose responses differ.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_dist.data.images import read_image
from grpo_dist.data.tokenize import TokenizedPrompt
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import AgentError, RewardError
from grpo_dist.protocol.fields import EXTRA
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.workers.rollout import GroupRequest
from grpo_dist.workers.scorer import Task


@dataclass
class RolloutJob:
    """Groups that were requested together. A group's key is its position in `requests`.

    Attributes:
        log_probs: by log-prob source and group.
        cancelled: groups that are no longer needed.
        timings: seconds from the first prompt sent until the last group was generated (`gen`) and scored (`reward`),
            and the seconds that log-probs and the reward model took beyond `gen` (`ref`, `old_log_prob`,
            `reward_model`).
        unscored: of each group an error message for each response that could not be scored.
        failed: for each group without a result, why too few of its episodes were left.
        flows: the tasks that generate and score a group.
        passes: the tasks that compute log-probs and scores of the reward model.
    """

    requests: Sequence[GroupRequest]
    groups: dict[int, DataProtoRef] = field(default_factory=dict)
    scores: dict[int, DataProtoRef] = field(default_factory=dict)
    log_probs: dict[str, dict[int, DataProtoRef]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    timings: dict[str, float] = field(default_factory=dict)
    unscored: dict[int, list[str]] = field(default_factory=dict)
    failed: dict[int, AgentError] = field(default_factory=dict)
    failed_attempts: defaultdict[int, list[AgentError]] = field(default_factory=lambda: defaultdict(list))
    flows: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    passes: list[asyncio.Task[Any]] = field(default_factory=list)
    _started: float | None = None

    @property
    def failures(self) -> list[str]:
        """All of `unscored`, as they came."""
        return [text for texts in self.unscored.values() for text in texts]

    @property
    def num_unfinished(self) -> tuple[int, int]:
        """Episodes that have begun, and those of them that have failed, of groups that a checkpoint does not hold."""
        left = [i for i in list(self.failed_attempts) if i not in self.scores and i not in self.cancelled]
        failed = sum(error.was_last for i in left for error in self.failed_attempts[i])
        return sum(self.requests[i].sampling.n for i in left), failed

    def told(self, i: int) -> list[Any]:
        """What has failed of a group, as JSON; `retell` takes it."""
        attempts = [[str(error), error.kind, error.was_last] for error in self.failed_attempts.get(i, ())]
        return [attempts, self.unscored.get(i, [])]

    def retell(self, i: int, told: Sequence[Any]) -> None:
        """Take what failed of a group before a resume."""
        attempts, unscored = told
        self.failed_attempts[i] = [AgentError(text, kind, was_last=was_last) for text, kind, was_last in attempts]
        self.unscored[i] = unscored

    async def finished(self) -> None:
        """Wait until every group that is not cancelled has its scores and log-probs.

        Raises:
            GrpoDistError: a worker failed; RewardError if too many responses could not be scored.
        """
        if tasks := [*self.flows.values(), *self.passes]:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                if not task.cancelled():
                    task.result()

    async def ended(self) -> None:
        """Wait until nothing of the job is at work any more, whatever became of it."""
        await asyncio.gather(*self.flows.values(), *self.passes, return_exceptions=True)

    async def settled(self, enough: Callable[[], bool]) -> None:
        """Wait, as `finished`, until `enough` is true, tested when a group is scored or a pass ends."""
        if enough():
            return
        for task in asyncio.as_completed([*self.flows.values(), *self.passes]):
            await task
            if enough():
                return

    def cancel(self, groups: Iterable[int]) -> None:
        """Cancel those of these groups that have no scores yet."""
        late = [i for i in groups if i not in self.scores]
        self.cancelled.update(late)
        for i in late:
            if i in self.flows:
                self.flows[i].cancel()

    def results(self) -> list[DataProtoRef]:
        """The groups with scores and log-probs, in the order of the requests, without the cancelled ones."""
        return [self.result(i) for i in sorted(self.scores)]

    def result(self, i: int) -> DataProtoRef:
        """A group with its scores, and the log-probs that are there."""
        group = self.groups[i].union(self.scores[i])
        for log_probs in self.log_probs.values():
            group = group.union(log_probs[i]) if i in log_probs else group
        return group

    def batch(self) -> DataProtoRef:
        """`results` as one batch.

        Raises:
            AgentError: there are none, since every group has failed.
        """
        if not self.scores and self.failed:
            raise next(iter(self.failed.values()))
        return DataProtoRef.concat(self.results())

    def release(self, groups: Iterable[int]) -> None:
        """Drop the handles to groups that are no longer needed, so that the object store can free them. The job must be
        finished, because an unfinished pass needs all of its groups.
        """
        for i in groups:
            self.cancelled.add(i)
            for columns in (self.groups, self.scores, *self.log_probs.values()):
                columns.pop(i, None)

    def begin(self) -> None:
        """Note that a prompt is sent. The first one starts the clock of `timings`."""
        self._started = time.perf_counter() if self._started is None else self._started

    def note(self, kind: str, since: float = 0.0) -> None:
        """Note that work of this kind has just ended; a later call replaces the time."""
        elapsed = 0.0 if self._started is None else time.perf_counter() - self._started
        self.timings[kind] = max(elapsed - since, 0.0)


def timings(jobs: Sequence[RolloutJob]) -> dict[str, float]:
    """Seconds by kind of work, summed over consecutive jobs."""
    names = dict.fromkeys(name for job in jobs for name in job.timings)
    return {name: math.fsum(job.timings.get(name, 0.0) for job in jobs) for name in names}


def episode_metrics(jobs: Sequence[RolloutJob], prefix: str = "agent") -> dict[str, float]:
    """What has failed of the episodes of some jobs: attempts by kind, groups that were dropped, episodes that others
    lack, and the share of all attempts that do not train for it: those that failed, and all of dropped groups.
    """
    counts, begun, wasted = Counter[str](), 0, 0
    for job in jobs:
        for i, request in enumerate(job.requests):
            failed, is_dropped = job.failed_attempts.get(i, []), i in job.failed
            used_up = sum(error.was_last for error in failed)
            attempts = request.sampling.n + len(failed) - used_up  # another one follows each that was not the last
            begun, wasted = begun + attempts, wasted + (attempts if is_dropped else len(failed))
            counts.update(f"failures/{error.kind}" for error in failed)
            counts.update({"dropped_groups": int(is_dropped), "missing_episodes": 0 if is_dropped else used_up})
    metrics = {f"{prefix}/{name}": float(count) for name, count in counts.items() if count}
    return metrics | ({f"{prefix}/wasted_episodes": wasted / begun} if wasted else {})


def describe_failures(
    failures: Sequence[str], failed: Sequence[AgentError], failure_score: float | None
) -> Iterator[str]:
    """Say what is to be known about responses that could not be scored, and about groups of which an episode failed."""
    if failures:
        left_out = "null: in training they are left out, in validation they are the worst"
        what = left_out if failure_score is None else f"{failure_score:g} is their score"
        count = f"{len(failures)} responses" if len(failures) > 1 else "1 response"
        yield f"{count} could not be scored; reward.failure_score={what}. The first:\n{failures[0]}"
    if failed:
        count = f"{len(failed)} groups were" if len(failed) > 1 else "1 group was"
        yield f"{count} dropped, since too few of their episodes were left. The first:\n{failed[0]}"


# vLLM seeds response i of a group with seed + i; leave room below 2^31 for any group size.
_SEED_BITS = 30
VALIDATION_STEP = 0  # whose seeds every validation has; training steps count from 1


def group_seed(run_seed: int, step: int, prompt_index: int, attempt: int = 0) -> int:
    """Return the seed of a group's first response, from run seed, step, prompt, and batch of prompts in the step."""
    again = f"/{attempt}" if attempt else ""
    digest = hashlib.blake2b(f"{run_seed}/{step}/{prompt_index}{again}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)


def make_request(
    uid: str, prompt: TokenizedPrompt, sampling: SamplingSettings, *, validation: bool = False, step: int = 0
) -> GroupRequest:
    """Return the request for a group of responses to a prompt, after so many steps."""
    row = prompt.prompt
    images = tuple(read_image(image, row.location) for image in row.images)
    task = Task.of(row, validation=validation, step=step)
    return GroupRequest(uid, prompt.token_ids, sampling, task, images=images)


def informative(group: DataProtoRef, metric: str) -> bool:
    """Return whether the responses of a group differ in `metric`: `score`, or an extra value of the reward function.

    Those without the value are ignored. A group with fewer than two values is not informative.
    """
    values = group.small.get(_column(group, metric))
    return values is not None and len(np.unique(values[~np.isnan(values)])) > 1


def require_metric(groups: Collection[DataProtoRef], metric: str) -> None:
    """Check that at least one response has the value that groups are filtered by.

    Raises:
        RewardError: no response has it.
    """
    if any(_column(group, metric) in group.small for group in groups):
        return
    known = dict.fromkeys(key.removeprefix(EXTRA) for group in groups for key in group.small if key.startswith(EXTRA))
    raise RewardError(
        f"algorithm.filter_groups.metric={metric}: no response has it, the reward function returns "
        f"{', '.join(['score', *known])}. Return a dict with {metric!r}, or set algorithm.filter_groups.metric=score"
    )


def _column(group: DataProtoRef, metric: str) -> str:
    return metric if metric in group.small else EXTRA + metric
