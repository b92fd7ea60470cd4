"""Validation: the requests, the metrics, and the choice of responses to show.

Metrics have verl's names, `val-core/SOURCE/VARIABLE/STATISTIC`, one set per data source. The core variable is `acc`
if the reward function returns it for every response, else `reward` (the score). Its mean@n, best@n/mean and
maj@n/mean are in val-core; everything else is in val-aux. algorithms/validation.py defines the statistics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from grpo_dist.algorithms.validation import best_at_k, judged, majority_at_n, subset_sizes, worst_at_k
from grpo_dist.data.tokenize import TokenizedPrompt
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.trainer.rollout.sampling import make_request
from grpo_dist.trainer.rollout.seeds import group_seed
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.reward import EXTRA
from grpo_dist.workers.rollout_group import GroupRequest

CORE, AUX = "val-core", "val-aux"
_SEED_STEP = 0  # training steps count from 1


def validation_requests(
    prompts: Sequence[TokenizedPrompt], sampling: SamplingSettings, run_seed: int
) -> list[GroupRequest]:
    """Build the requests for all validation prompts.

    Args:
        prompts: the validation prompts.
        sampling: sampling settings; a seed, if set, is replaced by one per prompt, the same at every validation.
        run_seed: `trainer.seed`.
    """

    def seeded(index: int) -> SamplingSettings:
        seed = None if sampling.seed is None else group_seed(run_seed, _SEED_STEP, index)
        return dataclasses.replace(sampling, seed=seed)

    return [make_request(f"val-{p.prompt.index}", p, seeded(p.prompt.index), validation=True) for p in prompts]


def validation_metrics(batch: DataProtoRef, data_sources: Mapping[str, str], n: int) -> dict[str, float]:
    """Metrics of a scored validation batch.

    Args:
        batch: P * n rows; the n responses to a prompt are consecutive.
        data_sources: uid -> data source.
        n: responses per prompt.

    Returns:
        For each data source: statistics of `reward`, and of `acc` if returned: mean@n and, for n > 1, std@n,
        best@k/mean and worst@k/mean for each k of `subset_sizes`, and maj@n/mean if the reward function returns `pred`;
        means of the reward function's other values, of lengths and of truncation; the share of failed responses, if
        there are any. A response without a score counts as the worst one of its data source.
    """
    sources = np.array([data_sources[uid] for uid in batch["uid"]])
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(sources.tolist()):
        rows = batch.reorder(np.flatnonzero(sources == source))
        metrics |= _of_one_source(rows, source, n)
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
        for name, value in _statistics(values.reshape(-1, n), answers):
            is_core = variable == core and name in (f"mean@{n}", f"best@{n}/mean", f"maj@{n}/mean")
            metrics[f"{CORE if is_core else AUX}/{source}/{variable}/{name}"] = value
    return metrics | {f"{AUX}/{source}/{name}/mean": float(np.nanmean(values)) for name, values in means.items()}


def _statistics(scores: np.ndarray, answers: np.ndarray | None) -> Iterator[tuple[str, float]]:
    """(name, value) of each statistic, averaged over prompts. Shapes: scores (P, n), answers (P * n,)."""
    n = scores.shape[-1]
    yield f"mean@{n}", float(scores.mean())
    if n == 1:
        return
    yield f"std@{n}", float(scores.std(-1).mean())
    for k in subset_sizes(n):
        yield f"best@{k}/mean", float(best_at_k(scores, k).mean())
        yield f"worst@{k}/mean", float(worst_at_k(scores, k).mean())
    if answers is not None and not np.isnan(answers).all():
        yield f"maj@{n}/mean", float(majority_at_n(scores, answers.reshape(-1, n)).mean())


def shown_rows(num_rows: int, count: int, seed: int) -> np.ndarray:
    """Indices of `count` random rows of a validation batch, sorted; the same at every validation, all if fewer."""
    chosen = np.random.default_rng(seed).choice(num_rows, size=min(count, num_rows), replace=False)
    return np.sort(chosen)
