"""The rollout of each training step: which prompts are sampled how, and which of their groups train.

Every prompt is sampled `rollout.n` times. ReMax also samples each prompt once greedily, for its baseline. With
`algorithm.filter_groups` (DAPO's dynamic sampling) groups whose responses have equal rewards are dropped, since they
have no gradient, and more prompts are sampled until the batch is full; surplus groups are dropped too. With
`rollout.over_sample_rate` more prompts are sampled than train, and the slowest groups are cancelled once enough are
finished; their prompts come first in the next batch that is drawn. The handles of dropped groups are kept until their
batch of prompts is complete, because passes of models have fixed shares and need them.

A step is opened when its prompts may be sampled (as many steps ahead of the update as they may be stale), and goes on
in the background until its batch is full (`_fill`). Prompts are drawn step by step, so none is skipped or used twice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_dist.algorithms.advantage import ADVANTAGE
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.sampler import Curriculum
from grpo_dist.data.tokenize import TokenizedPrompt
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import AgentError, DataError, DataLost, GrpoDistError, RewardError
from grpo_dist.protocol.fields import UNPENALISED
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.trainer.checkpoint.saver import FinishedGroups, Group
from grpo_dist.trainer.rollout.job import (
    RolloutJob,
    episode_metrics,
    group_seed,
    informative,
    make_request,
    require_metric,
    timings,
)
from grpo_dist.trainer.rollout.pump import RolloutPump
from grpo_dist.workers.rollout import GroupRequest


@dataclass
class Rollout:
    """The result of a step's sampling.

    Attributes:
        batch: the groups that train, `train_batch_size` of up to n rows.
        timings: seconds by kind of work, summed over the batches of prompts.
        metrics: number of batches of prompts, and share of dropped groups.
        failures: an error message for each response that could not be scored.
        failed: for each group that failed because of an episode, why.
        num_responses: all sampled responses, including failed and dropped ones.
    """

    batch: DataProtoRef
    requests: list[GroupRequest]
    timings: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    failed: list[AgentError] = field(default_factory=list)
    num_responses: int = 0


@dataclass
class OpenStep:
    """A step whose batch is being sampled.

    Attributes:
        drawn: the batches of prompts (positions in the training set), in the order they were drawn.
        dropped: by batch, the positions of groups that do not train: cancelled, surplus, or with equal rewards.
        num_complete: batches whose groups are all in `kept` or `dropped`.
        num_learned: batches whose scores `order` was told before a resume.
        num_filtered: dropped groups with equal rewards.
        num_surplus: dropped groups beyond a full batch.
        num_dropped_tokens: of the responses of both.
    """

    drawn: list[list[int]] = field(default_factory=list)
    jobs: list[RolloutJob] = field(default_factory=list)
    kept: list[tuple[GroupRequest, DataProtoRef]] = field(default_factory=list)
    dropped: dict[int, set[int]] = field(default_factory=dict)
    num_complete: int = 0
    num_learned: int = 0
    num_filtered: int = 0
    num_surplus: int = 0
    num_dropped_tokens: int = 0
    filling: asyncio.Task[None] | None = None

    @property
    def num_sampled(self) -> int:
        """Groups of complete batches, without cancelled ones."""
        return len(self.kept) + self.num_filtered + self.num_surplus

    def prompts(self) -> list[list[int]]:
        """`drawn` without the prompts whose groups do not train in this step."""
        return [
            [prompt for i, prompt in enumerate(batch) if i not in self.dropped.get(number, ())]
            for number, batch in enumerate(self.drawn)
        ]


_DROPPED = ("num_filtered", "num_surplus", "num_dropped_tokens")  # of what a resumed step does not sample again


class TrainingSampler:
    """Samples the groups of the training steps; `order` is told the scores of every group."""

    def __init__(
        self,
        config: RunConfig,
        pump: RolloutPump,
        prompts: Sequence[TokenizedPrompt],
        order: Curriculum,
        sampling: SamplingSettings,
    ) -> None:
        self.config, self.pump, self.prompts, self.order, self.sampling = config, pump, prompts, order, sampling
        self.open: dict[int, OpenStep] = {}
        self.backlog: list[int] = []  # prompts that were drawn but whose groups are not finished
        self.learned: Counter[int] = Counter()  # prompts to sample again whose scores `order` was told already
        self.restored: dict[str, Group] = {}  # by uid: finished groups of open steps, from a checkpoint
        self.failed: dict[str, list[Any]] = {}  # by uid: what had failed of them (`RolloutJob.told`)

    def open_steps(self, first: int, last: int) -> None:
        """Begin to sample all steps from `first` to `last` that are not open yet, in order."""
        for step in range(first, last + 1):
            state = self.open.setdefault(step, OpenStep())
            if state.filling is None:
                state.filling = self.pump.spawn(self._fill(step, state, self._send_batch(step, state)))

    async def rollout(self, step: int) -> Rollout:
        """Wait for the batch of `step`; opens the step if it is not open yet. It stays open until `close`.

        Raises:
            GrpoDistError: a worker failed, too few groups with different rewards were found, or no function judged
                any response of the first step.
        """
        self.open_steps(step, step)
        state = self.open[step]
        assert state.filling is not None
        await asyncio.shield(state.filling)  # cancelling the wait does not cancel the sampling
        requests, groups = zip(*state.kept, strict=True)
        result = Rollout(DataProtoRef.concat(groups), list(requests))
        result.timings = timings(state.jobs)
        result.failures = [text for job in state.jobs for text in job.failures]
        if step == 1 and not result.failures and np.isnan(result.batch["score"]).all():
            raise RewardError(
                "custom_reward_function.path: every function returned None for every response of step 1, so none has a "
                "score; return a number where a function can judge, and give the rows the columns that it judges by"
            )
        result.failed = [error for job in state.jobs for error in job.failed.values()]
        result.metrics |= episode_metrics(state.jobs)
        result.num_responses = sum(request.sampling.n for job in state.jobs for request in job.requests)
        if self.config.algorithm.filter_groups.enable:
            result.metrics["train/num_gen_batches"] = len(state.jobs)
            result.metrics["train/filtered_groups"] = state.num_filtered / state.num_sampled
            kept_tokens = int(result.batch["response_length"].sum())
            result.metrics["train/sampled_tokens"] = kept_tokens + state.num_dropped_tokens
        if self.num_spare:
            result.metrics["train/aborted_groups"] = sum(len(groups) for groups in state.dropped.values())
        return result

    def close(self, step: int) -> None:
        """Forget `step`, whose batch has trained."""
        del self.open[step]

    @property
    def num_spare(self) -> int:
        """Prompts that a batch samples beyond those that train."""
        return math.ceil(self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.over_sample_rate)

    @property
    def batch_sizes(self) -> list[int | None]:
        """The numbers that the size of a batch of prompts depends on."""
        return [self.config.data.train_batch_size, self.config.data.gen_batch_size, self.num_spare]

    def state_dict(self) -> dict[str, Any]:
        """The ledger as JSON: prompts that were drawn and have not trained, by step."""
        # copies, because sampling continues while they are written
        jobs = [job for state in self.open.values() for job in state.jobs]
        begun, failed = map(sum, zip((0, 0), *(job.num_unfinished for job in jobs), strict=True))
        return {
            "open": {str(step): state.prompts() for step, state in self.open.items()},
            "backlog": list(self.backlog),
            "num_learned": {str(step): max(state.num_learned, state.num_complete) for step, state in self.open.items()},
            **{name: {str(step): getattr(state, name) for step, state in self.open.items()} for name in _DROPPED},
            "learned": sorted(self.learned.elements()),
            "batch_sizes": self.batch_sizes,
            "failed": {job.requests[i].uid: told for job in jobs for i in list(job.scores) if any(told := job.told(i))},
            "num_episodes": [self.pump.num_episodes - begun, self.pump.num_failed_episodes - failed],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Steps that were open sample the same prompts again, except the groups in `restored`.

        If the batch sizes have changed, the prompts of open steps come first in the batches that are drawn next.
        """
        self.backlog, self.learned = list(state["backlog"]), Counter(state.get("learned", ()))
        self.failed, self.open = dict(state.get("failed", {})), {}
        self.pump.num_episodes, self.pump.num_failed_episodes = state.get("num_episodes", (0, 0))
        for step, batches in state["open"].items():
            counts = {name: state.get(name, {}).get(step, 0) for name in ("num_learned", *_DROPPED)}
            self.open[int(step)] = OpenStep([list(batch) for batch in batches], **counts)
        if state.get("batch_sizes", self.batch_sizes) != self.batch_sizes:
            steps = self.open.values()
            self.backlog = [i for step in steps for batch in step.drawn for i in batch] + self.backlog
            self.learned.update(i for step in steps for batch in step.drawn[: step.num_learned] for i in batch)
            self.open = {}

    def finished_groups(self) -> list[FinishedGroups]:
        """The finished groups of the open steps, one part for each batch of prompts."""
        finished = []
        for step, state in self.open.items():
            for attempt, job in enumerate(state.jobs):
                groups = {job.requests[i].uid: (job.groups[i], job.scores[i]) for i in sorted(job.scores)}
                if groups:
                    finished.append(FinishedGroups(f"step{step}-try{attempt + 1}", groups))
        return finished

    # --- parts -------------------------------------------------------------------------------------------------
    async def _fill(self, step: int, state: OpenStep, job: RolloutJob) -> None:
        """Sample batches of prompts, of which `job` is the first, until the step's batch is full.

        If a machine is lost meanwhile, which had some of the groups, all of `job` are sampled again, by the same seeds.

        Raises:
            GrpoDistError: as `rollout`.
        """
        while True:
            lost = self.pump.machines_lost
            try:
                if self.num_spare and state.num_complete not in state.dropped:
                    await self._cancel_the_slowest(state, job)
                await job.finished()
            except DataLost:
                if self.num_spare:  # others might be chosen
                    raise
                lost = -1
            if lost != self.pump.machines_lost and not self.num_spare:
                state.jobs.pop()
                await job.ended()
                job = self._send_batch(step, state)
                continue
            self._choose_groups(step, state, job)
            if len(state.kept) == self.config.data.train_batch_size:
                return
            job = self._send_batch(step, state)

    def _send_batch(self, step: int, state: OpenStep) -> RolloutJob:
        """Sample the step's next batch of prompts: one that was drawn before, or a new one."""
        attempt = len(state.jobs)
        if attempt == len(state.drawn):
            again = attempt and not self.config.algorithm.filter_groups.enable  # in place of groups that have failed
            state.drawn.append(self._draw(self.config.data.train_batch_size - len(state.kept) if again else None))
        requests = self._requests(state.drawn[attempt], step, attempt)
        needs = ADVANTAGE.needs(self.config.algorithm.adv_estimator)
        greedy = list(self._greedy(requests)) if "reward_baselines" in needs else []
        requests += greedy
        uids = [request.uid for request in requests]
        finished = {i: self.restored.pop(uid) for i, uid in enumerate(uids) if uid in self.restored}
        sources, cancels = self.pump.sources, bool(self.num_spare)
        job = self.pump.submit(requests, sources=sources, finished=finished, cancels=cancels)
        for i in finished:
            job.retell(i, self.failed.pop(uids[i], ([], [])))
        state.jobs.append(job)
        return job

    def _draw(self, missing: int | None) -> list[int]:
        """The prompts of the next batch, or as many as are `missing`, none twice; those of the backlog come first.

        Raises:
            DataError: the order does not give so many different prompts.
        """
        data = self.config.data
        if missing is None and not self.num_spare and not self.backlog:
            return [int(i) for i in self.order.next_batch()]
        wanted = (missing or data.gen_batch_size or data.train_batch_size) + self.num_spare
        batch: list[int] = []
        again: list[int] = []
        while len(batch) < wanted:
            if len(again) > 2 * len(self.prompts):
                raise DataError(
                    f"actor_rollout_ref.rollout.over_sample_rate: a batch samples {wanted} different prompts, and the "
                    f"order of the training set gives only {len(batch)}; lower it, or data.train_batch_size"
                )
            self.backlog = self.backlog or [int(i) for i in self.order.next_batch()]
            i = self.backlog.pop(0)
            (again if i in batch else batch).append(i)
        self.backlog = again + self.backlog
        return batch

    async def _cancel_the_slowest(self, state: OpenStep, job: RolloutJob) -> None:
        """Once enough groups are there, cancel the others; their prompts come first in the next batch that is drawn."""
        drawn, wanted = state.drawn[state.num_complete], self.config.data.train_batch_size - len(state.kept)

        def complete() -> list[int]:
            return [i for i in range(len(drawn)) if job.scores.keys() >= set(_requests_of(i, drawn, job))]

        await job.settled(lambda: len(complete()) >= wanted)
        late = set(range(len(drawn))) - set(complete()[:wanted])
        state.dropped[state.num_complete] = late
        again = [i for i in sorted(late) if job.failed.keys().isdisjoint(_requests_of(i, drawn, job))]
        self.backlog = [drawn[i] for i in again] + self.backlog
        job.cancel({request for i in late for request in _requests_of(i, drawn, job)})

    def _choose_groups(self, step: int, state: OpenStep, job: RolloutJob) -> None:
        """Keep the groups of a complete batch that train, and release the others.

        Raises:
            GrpoDistError: too few groups with different rewards were found.
            RewardError: no response of the batch has the value that groups are filtered by.
        """
        filtering, wanted = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        number, drawn = state.num_complete, state.drawn[state.num_complete]
        sampled = self._groups(job, drawn, state.dropped.get(number, set()))
        if number >= state.num_learned:
            self._learn({drawn[i]: group.small.get(UNPENALISED, group["score"]) for i, group in sampled.items()})
        # no group has the metric if all have failed, or if the whole batch was dropped before a resume
        if filtering.enable and len(job.failures) < sum(len(group) for group in sampled.values()):
            require_metric(sampled.values(), filtering.metric)
        differing = [i for i, g in sampled.items() if not filtering.enable or informative(g, filtering.metric)]
        kept = differing[: wanted - len(state.kept)]
        state.num_filtered += len(sampled) - len(differing)
        state.num_surplus += len(differing) - len(kept)
        not_kept = (group for i, group in sampled.items() if i not in kept)
        state.num_dropped_tokens += sum(int(group["response_length"].sum()) for group in not_kept)
        state.kept += [(job.requests[i], sampled[i]) for i in kept]
        dropped = state.dropped[number] = set(range(len(drawn))) - set(kept)
        job.release(request for i in dropped for request in _requests_of(i, drawn, job))
        state.num_complete += 1
        is_last = filtering.enable and state.num_complete == filtering.max_num_gen_batches
        if is_last and len(state.kept) < wanted:
            raise GrpoDistError(
                f"algorithm.filter_groups.max_num_gen_batches={state.num_complete}: of {state.num_sampled} groups for "
                f"step {step} only {len(state.kept)} of the {wanted} needed have responses that differ in "
                f"{filtering.metric}: the prompts are too easy, too hard, or their reward says too little"
            )

    def _learn(self, scores: Mapping[int, np.ndarray]) -> None:
        """Tell `order` the scores of a batch, except those that it was told before a resume, and missing ones."""
        known = {i for i in scores if self.learned[i]}
        self.learned -= Counter(known)
        present = {i: values[~np.isnan(values)] for i, values in scores.items() if i not in known}
        if new := {i: values for i, values in present.items() if len(values)}:
            self.order.update(new)

    def _groups(self, job: RolloutJob, drawn: Sequence[int], late: set[int]) -> dict[int, DataProtoRef]:
        """The sampled groups by position in the batch, without those that have failed."""
        groups = {i: _group(job, _requests_of(i, drawn, job)) for i in range(len(drawn)) if i not in late}
        return {i: group for i, group in groups.items() if group is not None}

    def _requests(self, positions: Sequence[int], step: int, attempt: int) -> list[GroupRequest]:
        requests = []
        for i in positions:
            prompt = self.prompts[i]
            index, seed = prompt.prompt.index, None
            if self.sampling.seed is not None:
                seed = group_seed(self.config.trainer.seed, step, index, attempt)
            uid = f"step{step}-prompt{index}" + (f"-try{attempt + 1}" if attempt else "")
            requests.append(make_request(uid, prompt, dataclasses.replace(self.sampling, seed=seed), step=step - 1))
        return requests

    def _greedy(self, requests: Sequence[GroupRequest]) -> Iterator[GroupRequest]:
        sampling = dataclasses.replace(self.sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, seed=None)
        for request in requests:
            yield dataclasses.replace(request, uid=f"{request.uid}-greedy", sampling=sampling, needs_log_probs=False)


def _group(job: RolloutJob, requests: Sequence[int]) -> DataProtoRef | None:
    """A prompt's group, for ReMax with the greedy score as `reward_baseline`; None: a request of it has failed."""
    if any(i not in job.scores for i in requests):
        return None
    group = job.result(requests[0])
    for baseline in requests[1:]:
        column = np.full(len(group), job.scores[baseline]["score"][0], np.float32)
        group = dataclasses.replace(group, small=group.small | {"reward_baseline": column})
    return group


def _requests_of(i: int, drawn: Sequence[int], job: RolloutJob) -> tuple[int, ...]:
    """A job's requests for the i-th of its prompts; ReMax's greedy ones follow all others."""
    return (i, i + len(drawn)) if len(job.requests) > len(drawn) else (i,)
