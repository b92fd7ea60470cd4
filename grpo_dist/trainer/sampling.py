"""The rollout of one training step: which prompts are sampled how, and which of their groups train.

Every prompt is sampled `rollout.n` times. ReMax also samples each prompt once greedily, for its baseline. With
`algorithm.filter_groups` (DAPO's dynamic sampling) groups whose responses are all equal teach nothing: they are
dropped, and more prompts are sampled until the batch is full. What is sampled beyond that is dropped too, since the
next step has other weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo_dist.config.schema import RunConfig
from grpo_dist.data.curriculum import Curriculum
from grpo_dist.data.tokenize import TokenizedPrompt
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import GrpoDistError, RewardError
from grpo_dist.trainer.pump import GroupRequest, RolloutPump
from grpo_dist.trainer.seeds import group_seed
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.reward import EXTRA, Task


@dataclass
class Rollout:
    """What a step's sampling gave.

    Attributes:
        batch: the groups that train, `train_batch_size * n` rows.
        requests: what was asked for, group by group.
        timings: seconds by kind of work, summed over the batches that were sampled.
        metrics: how many batches of prompts it took, and which share of the groups was dropped.
        failures: why responses could not be scored, a text for each.
    """

    batch: DataProtoRef = field(default_factory=DataProtoRef)
    requests: list[GroupRequest] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


@dataclass
class TrainingSampler:
    """Samples the groups of a training step.

    Attributes:
        config: the whole run's config.
        pump: generates and scores.
        prompts: the training prompts.
        order: the order they are taken in; it is told the scores of every group.
        sampling: how to sample; a seed that is not None is replaced by one per group.
    """

    config: RunConfig
    pump: RolloutPump
    prompts: Sequence[TokenizedPrompt]
    order: Curriculum
    sampling: SamplingSettings

    def rollout(self, step: int) -> Rollout:
        """Sample the batch of `step`.

        Raises:
            GrpoDistError: a worker failed, or too few groups with different rewards were found.
        """
        filtering, wanted = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        result, sampled, attempt = Rollout(), 0, 0
        kept: list[tuple[GroupRequest, DataProtoRef]] = []
        while len(kept) < wanted:
            if filtering.enable and attempt and attempt == filtering.max_num_gen_batches:
                raise GrpoDistError(
                    f"algorithm.filter_groups.max_num_gen_batches={attempt}: of {sampled} groups only {len(kept)} of "
                    f"the {wanted} needed have responses that differ in {filtering.metric}: the prompts are too easy, "
                    "too hard, or their reward says too little"
                )
            positions = [int(i) for i in self.order.next_batch()]
            requests = self._requests(positions, step, attempt)
            groups = self._sample(requests, result)
            self.order.update({i: group["score"] for i, group in zip(positions, groups, strict=True)})
            sampled, attempt = sampled + len(groups), attempt + 1
            pairs = zip(requests, groups, strict=True)
            kept += [pair for pair in pairs if not filtering.enable or informative(pair[1], filtering.metric)]
        result.requests = [request for request, _ in kept[:wanted]]
        result.batch = DataProtoRef.concat([group for _, group in kept[:wanted]])
        if filtering.enable:
            result.metrics["train/num_gen_batches"] = attempt
            result.metrics["train/filtered_groups"] = 1 - len(kept) / sampled
        return result

    def _sample(self, requests: list[GroupRequest], result: Rollout) -> list[DataProtoRef]:
        """One handle per request; for ReMax with the greedy score as `reward_baseline`."""
        greedy = list(self._greedy(requests)) if self.config.algorithm.adv_estimator == "remax" else []
        pumped = self.pump.run([*requests, *greedy])
        result.failures += pumped.failures
        for name, seconds in pumped.timings.items():
            result.timings[name] = result.timings.get(name, 0.0) + seconds
        own, baselines = pumped.groups[: len(requests)], pumped.groups[len(requests) :]
        for i, baseline in enumerate(baselines):
            column = np.full(len(own[i]), baseline["score"][0], np.float32)
            own[i] = dataclasses.replace(own[i], small=own[i].small | {"reward_baseline": column})
        return own

    def _requests(self, positions: Sequence[int], step: int, attempt: int) -> list[GroupRequest]:
        requests = []
        for i in positions:
            prompt = self.prompts[i]
            index, seed = prompt.prompt.index, None
            if self.sampling.seed is not None:
                seed = group_seed(self.config.trainer.seed, step, index, attempt)
            uid = f"step{step}-prompt{index}" + (f"-try{attempt + 1}" if attempt else "")
            requests.append(make_request(uid, prompt, dataclasses.replace(self.sampling, seed=seed)))
        return requests

    def _greedy(self, requests: Sequence[GroupRequest]) -> Iterator[GroupRequest]:
        sampling = dataclasses.replace(self.sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, seed=None)
        for request in requests:
            yield dataclasses.replace(request, uid=f"{request.uid}-greedy", sampling=sampling, needs_ref=False)


def informative(group: DataProtoRef, metric: str) -> bool:
    """Whether the responses of a group differ in `metric`: `score`, or an extra value of the reward function.

    Raises:
        RewardError: the reward function did not return it.
    """
    name = metric if metric in group.small else EXTRA + metric
    if name not in group.small:
        known = [key.removeprefix(EXTRA) for key in group.small if key.startswith(EXTRA)]
        raise RewardError(
            f"algorithm.filter_groups.metric={metric}: the reward function returns {', '.join(['score', *known])}"
        )
    return bool(np.ptp(group[name]) > 0)


def make_request(uid: str, prompt: TokenizedPrompt, sampling: SamplingSettings, **task: bool) -> GroupRequest:
    """Ask for a group of responses to a prompt."""
    source = prompt.prompt
    return GroupRequest(
        uid,
        prompt.token_ids,
        sampling,
        Task(source.data_source, source.ground_truth, source.extra_info, source.messages, **task),
    )
