"""Validation: the requests, the metrics, and the choice of responses to show.

Metrics have verl's names, `val-core/SOURCE/VARIABLE/STATISTIC`, one set per data source. The core variable is `acc`
if the reward function returns it for every response, else `reward` (the score). Its mean@n, best@n/mean and
maj@n/mean are in val-core; everything else is in val-aux. algorithms/validation.py defines the statistics.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_dist.agents.recording import NO_VERSION
from grpo_dist.algorithms.validation import judged, statistics
from grpo_dist.config.schema import RunConfig, TrainerConfig
from grpo_dist.data.tokenize import TokenizedPrompt
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.plan.placement import Placement
from grpo_dist.protocol.fields import EXTRA
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.sizes import GIB
from grpo_dist.tracking.jsonl import ROLLOUTS, VALIDATION
from grpo_dist.trainer.rollout.job import VALIDATION_STEP, RolloutJob, group_seed, make_request
from grpo_dist.trainer.rollout.pump import RolloutPump
from grpo_dist.workers.reward import RewardPool
from grpo_dist.workers.rollout import GroupRequest

CORE, AUX = "val-core", "val-aux"


def validation_requests(
    prompts: Sequence[TokenizedPrompt], sampling: SamplingSettings, run_seed: int, step: int = 0
) -> list[GroupRequest]:
    """Build the requests for all validation prompts after `step`; a seed becomes one per prompt, always the same."""
    requests = []
    for prompt in prompts:
        index = prompt.prompt.index
        seed = None if sampling.seed is None else group_seed(run_seed, VALIDATION_STEP, index)
        seeded = dataclasses.replace(sampling, seed=seed)
        requests.append(make_request(f"val-{index}", prompt, seeded, validation=True, step=step))
    return requests


@dataclass
class Validation:
    """Answers the validation prompts by the weights that the engines hold, maybe while a step is trained."""

    config: RunConfig
    prompts: Sequence[TokenizedPrompt]
    sampling: SamplingSettings
    pump: RolloutPump
    place: Placement
    step: int = 0
    _job: RolloutJob | None = None

    @property
    def comes_first(self) -> bool:
        """Tell if it must end before the next update: engines sleep during that, or it may say that there is none."""
        return self.place.engines_sleep or self.config.trainer.stop_at is not None

    def begin(self) -> RolloutJob:
        """Send the prompts to the engines once, ahead of those of later steps, for which no sync of weights waits."""
        if self._job is None:
            requests = validation_requests(self.prompts, self.sampling, self.config.trainer.seed, self.step)
            self._job = self.pump.submit(requests, first=self.config.trainer.samples_during_updates)
        return self._job

    async def finished(self) -> RolloutJob:
        """Wait, as `RolloutJob.finished`; if no engine has the weights any more, what is lacking is cancelled."""
        job, gone = self.begin(), self.pump.spawn(self.pump.rollout.weights_gone.wait())
        scored = self.pump.spawn(job.finished())
        await asyncio.wait([scored, gone], return_when=asyncio.FIRST_COMPLETED)
        if not gone.cancel():
            job.cancel(set(range(len(job.requests))) - job.groups.keys() - job.failed.keys())
        await scored
        self._job = None
        return job

    def metrics(self, job: RolloutJob, batch: DataProtoRef, weight_version: int) -> dict[str, float]:
        """Return `validation_metrics` of a job, all of whose tokens must be of this version of the weights."""
        versions = {*batch["weight_version"].tolist(), *batch["last_weight_version"].tolist()}
        assert versions <= {weight_version, NO_VERSION}, f"validated by weights {versions}, not {weight_version}"
        sources = {request.uid: request.task.data_source for request in job.requests}
        return validation_metrics(batch, sources, self.sampling.n)


def validation_metrics(batch: DataProtoRef, data_sources: Mapping[str, str], n: int) -> dict[str, float]:
    """Metrics of a scored validation batch.

    Args:
        batch: P * n rows; the n responses to a prompt are consecutive.
        data_sources: uid -> data source.

    Returns:
        For each data source: statistics of `reward`, and of `acc` if returned: mean@n and, for n > 1, std@n,
        best@k/mean and worst@k/mean for each k of `subset_sizes`, and maj@n/mean if the reward function returns `pred`;
        means of the reward function's other values, of lengths and of truncation; the share of failed responses, if
        there are any. A response without a score counts as the worst one of its data source.
    """
    sources = np.array([data_sources[uid] for uid in batch["uid"]])
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(sources.tolist()):
        metrics |= _of_one_source(batch.reorder(np.flatnonzero(sources == source)), source, n)
    return metrics


def _of_one_source(batch: DataProtoRef, source: str, n: int) -> dict[str, float]:
    failed = batch["failed"].astype(bool)
    variables = judged(batch["score"], failed, batch.small.get(f"{EXTRA}acc"))
    means = {name: batch[name] for name in ("response_length", "truncated", "num_turns")}
    for name, values in batch.small.items():
        if name == f"{EXTRA}acc" and "acc" in variables:
            continue
        if name.startswith(EXTRA) and not np.isnan(values).all():  # all nan: returned only for other data sources
            means[name.removeprefix(EXTRA)] = values
    if failed.any():
        means["failed"] = failed
    core = "acc" if "acc" in variables else "reward"
    answers = batch.small.get("pred_id")
    metrics: dict[str, float] = {}
    for variable, values in variables.items():
        for name, of_prompts in statistics(values.reshape(-1, n), answers).items():
            kind = CORE if variable == core and name in (f"mean@{n}", f"best@{n}", f"maj@{n}") else AUX
            name += "" if name.startswith(("mean@", "std@")) else "/mean"
            metrics[f"{kind}/{source}/{variable}/{name}"] = float(of_prompts.mean())
    return metrics | {f"{AUX}/{source}/{name}/mean": float(np.nanmean(values)) for name, values in means.items()}


def shown_rows(num_rows: int, count: int, seed: int) -> np.ndarray:
    """Indices of `count` random rows of a validation batch, sorted; the same at every validation, all if fewer."""
    chosen = np.random.default_rng(seed).choice(num_rows, size=min(count, num_rows), replace=False)
    return np.sort(chosen)


@dataclass
class SampleLog:
    """Turns batches into text, in the reward processes, which have the tokenizer."""

    config: TrainerConfig
    reward: RewardPool
    _writing: list[asyncio.Task[None]] = field(default_factory=list)

    async def write_rollouts(self, step: int, batch: DataProtoRef, requests: Sequence[GroupRequest]) -> None:
        """Start writing a training step, its tokens too; first waits for the previous files."""
        await self.collect()
        if self.config.log_rollouts:
            limit = self.config.log_rollouts_max_gib
            most_bytes = math.inf if limit is None else limit * GIB
            arguments = self._path(ROLLOUTS, step), step, _asked(requests), most_bytes
            self._writing.append(self.reward.write_rollouts(batch, *arguments))

    async def write_validation(self, step: int, batch: DataProtoRef, requests: Sequence[GroupRequest]) -> None:
        """Start writing the responses of a validation as text; first waits for the previous files."""
        await self.collect()
        if self.config.log_rollouts:
            path = self._path(VALIDATION, step)
            self._writing.append(self.reward.write_samples(batch, path, step, _asked(requests)))

    def _path(self, folder: str, step: int) -> str:
        return str((self.config.record_dir / folder / f"{step}.jsonl").absolute())

    async def collect(self) -> None:
        """Wait until all started files are written."""
        for writing in self._writing:
            await writing
        self._writing.clear()

    async def read_some(self, step: int, batch: DataProtoRef, requests: Sequence[GroupRequest]) -> list[dict[str, Any]]:
        """Read `log_val_generations` rows as text; the same rows at every validation."""
        count = self.config.log_val_generations
        if not count:
            return []
        rows = batch.reorder(shown_rows(len(batch), count, self.config.seed))
        return await self.reward.read_samples(rows, step, _asked(requests))


def _asked(requests: Sequence[GroupRequest]) -> dict[str, Any]:
    tasks = {request.uid: request.task for request in requests}
    return {uid: {"gts": task.ground_truth, "row": task.digest} for uid, task in tasks.items()}
