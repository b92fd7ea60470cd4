"""A step's metrics from the small columns on the driver, under verl's names."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.reward import EXTRA


def batch_metrics(batch: DataProtoRef) -> dict[str, float]:
    """Scores, advantages and lengths of a scored batch with advantages."""
    scores, uids = batch["score"], batch["uid"]
    metrics = {
        **_spread("critic/score", scores),
        **_spread("critic/rewards", batch["reward"]),
        **_spread("critic/advantages", batch["advantage_mean"]),
        **_spread("response_length", batch["response_length"]),
        **_spread("prompt_length", batch["prompt_length"]),
        **_spread("num_turns", batch["num_turns"]),
        "response_length/clip_ratio": float(batch["truncated"].mean()),
        "critic/zero_variance_groups": zero_variance_share(scores, uids),
        "perf/total_num_tokens": float(batch["prompt_length"].sum() + batch["response_length"].sum()),
    }
    extras = {name: values for name, values in batch.small.items() if name.startswith(EXTRA)}
    return metrics | {f"{name}/mean": float(np.nanmean(v)) for name, v in extras.items() if not np.isnan(v).all()}


def performance_metrics(timings: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage, and tokens per second: over the whole step, while generating, and while updating."""
    total = timings["step"]
    tokens = metrics["perf/total_num_tokens"]
    response_tokens = (
        tokens * metrics["response_length/mean"] / (metrics["response_length/mean"] + metrics["prompt_length/mean"])
    )
    return {
        **{f"timing_s/{name}": seconds for name, seconds in timings.items()},
        "perf/time_per_step": total,
        "perf/throughput": tokens / total,
        "perf/generation_tokens_per_s": response_tokens / timings["gen"],
        "perf/update_tokens_per_s": tokens / timings["update_actor"],
    }


def zero_variance_share(scores: np.ndarray, uids: np.ndarray) -> float:
    """Share of groups whose responses all scored the same: they teach nothing."""
    groups = [scores[uids == uid] for uid in np.unique(uids)]
    return float(np.mean([np.ptp(group) == 0 for group in groups]))


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
