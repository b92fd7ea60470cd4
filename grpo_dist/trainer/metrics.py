"""Metrics of a step, with verl's names, computed from the small columns on the driver."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from grpo_dist.algorithms.agreement import most_apart
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import GrpoDistError, WorkerLost, in_a_line
from grpo_dist.plan.placement import Placement
from grpo_dist.plan.rules import engine_of, other_type
from grpo_dist.protocol.fields import EXTRA
from grpo_dist.protocol.sequences import UNKNOWN_ROUTES
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import blocking
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.tracking.metric_names import REWARDS, SCORE, ZERO_VARIANCE
from grpo_dist.workers.roles import Roles
from grpo_dist.workers.targets import Causes

# Metric name, without the role, for each key of `Process.peak_memory_gib`.
PEAK_MEMORY = {"resident": "max_memory_resident_gb", "gpu": "max_memory_gpu_gb"}
PEAK = ("memory", "peak_memory_gib")  # stage and method
# Seconds that a finished run waits for its workers to report their peak memory.
MEMORY_TIMEOUT_S = 30.0


def batch_metrics(batch: DataProtoRef) -> dict[str, float]:
    """Scores, rewards and lengths of a scored batch with advantages; responses without a score are in no score."""
    scores, uids, lengths = batch["score"], batch["uid"], batch["response_length"]
    metrics = {
        **_spread(SCORE, scores),
        **_spread(REWARDS, batch["reward"]),
        **_spread("response_length", lengths),
        **_spread("response_length_non_aborted", lengths[lengths > 0]),
        **_spread("prompt_length", batch["prompt_length"]),
        **_spread("num_turns", batch["num_turns"]),
        **_spread("training/num_turns", batch["num_turns"]),
        **_spread("tool_call_counts", batch.small.get(f"{EXTRA}tool_calls", lengths[:0])),
        "response_length/clip_ratio": float(batch["truncated"].mean()),
        "response_length_non_aborted/clip_ratio": float(batch["truncated"][lengths > 0].mean()),
        ZERO_VARIANCE: zero_variance_share(scores, uids),
        "perf/total_num_tokens": float(batch["prompt_length"].sum() + batch["response_length"].sum()),
    }
    if UNKNOWN_ROUTES in batch.small:
        unknown = batch[UNKNOWN_ROUTES].sum() / metrics["perf/total_num_tokens"]
        metrics["training/router_replay/unknown"] = float(unknown)
    extras = {name: values for name, values in batch.small.items() if name.startswith(EXTRA)}
    means = {f"{name}/mean": float(np.nanmean(v)) for name, v in extras.items() if not np.isnan(v).all()}
    if (delivered := means.pop(f"{EXTRA}delivered_tokens/mean", None)) is not None:  # no value of a reward function's
        metrics["agent/delivered_tokens"] = delivered
    return metrics | means


def staleness_metrics(batch: DataProtoRef, weight_version: int, limit: int) -> dict[str, float]:
    """Staleness of a batch: how many updates old the weights were that sampled the oldest token of each sequence.

    Returns:
        `staleness/mean` and `staleness/max`, the share of sequences of each age (`staleness/share/AGE`), and the share
        sampled by several weight versions (`staleness/spanning`), if `limit` is above 0.

    Raises:
        GrpoDistError: a sequence is older than `limit`, or newer than the policy, which is a bug.
    """
    ages = weight_version - batch["weight_version"]
    if ages.max() > limit or ages.min() < 0:
        raise GrpoDistError(
            f"responses came from weights {ages.min()} to {ages.max()} updates old, and at most {limit} are allowed"
        )
    if not limit:
        return {}
    spanning = batch["last_weight_version"] > batch["weight_version"]
    shares = {f"staleness/share/{age}": float((ages == age).mean()) for age in range(limit + 1)}
    spread = {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}
    return spread | shares | {"staleness/spanning": float(spanning.mean())}


def mismatch_causes(config: RunConfig, batch: DataProtoRef, weight_version: int) -> Causes | None:
    """Why sampler and trainer may differ in a trained batch; None: for one reason only, or it was not measured.

    Returns:
        ((N,) versions of the weights that each row's old log-probs are of, or None if all tokens are of these; (N,)
        which rows have tokens without recorded experts, or None if none are replayed; whether the sampler's
        distribution is cut).
    """
    if config.old_log_probs_from == "rollout":
        return None
    newest = lacks_routes = None
    if config.trainer.samples_during_updates:
        newest = np.full(len(batch), weight_version)
    if UNKNOWN_ROUTES in batch.small:
        lacks_routes = batch[UNKNOWN_ROUTES] > 0
    if newest is None and lacks_routes is None and not config.filters:
        return None
    return newest, lacks_routes, bool(config.filters)


class IdleShares:
    """Share of the time in which the processes of each role were idle, since the last call."""

    def __init__(self, groups: Sequence[WorkerGroup]) -> None:
        self._groups = groups
        self._since, self._busy = time.monotonic(), [group.busy_seconds() for group in groups]

    def since_last(self) -> dict[str, float]:
        """`perf/idle/ROLE` since the last call."""
        now, busy = time.monotonic(), [group.busy_seconds() for group in self._groups]
        seconds, shares = max(now - self._since, 1e-9), {}
        for group, before, after in zip(self._groups, self._busy, busy, strict=True):
            share = (after - before) / (max(len(group.present), 1) * seconds)
            shares[f"perf/idle/{group.role}"] = max(0.0, 1 - share)
        self._since, self._busy = now, busy
        return shares


class PeakMemory:
    """Peak memory of the processes of each role so far, which are asked without waiting: they may be busy or hang."""

    def __init__(self, groups: Sequence[WorkerGroup]) -> None:
        self._groups = groups
        self._asking: asyncio.Future[list[None]] | None = None
        self._peaks: dict[str, float] = {}

    def latest(self) -> dict[str, float]:
        """Metrics of `PEAK_MEMORY` by role, GiB, from the answers so far. Call it on the driver's event loop."""
        if self._asking is None or self._asking.done():
            asked = [self._ask(group, rank) for group in self._groups for rank in group.present]
            self._asking = asyncio.ensure_future(asyncio.gather(*asked))
        of_actor = self._peaks.get(f"perf/{PEAK_MEMORY['gpu']}/actor")
        return self._peaks | ({} if of_actor is None else {"perf/max_memory_allocated_gb": of_actor})

    async def _ask(self, group: WorkerGroup, rank: int) -> None:
        with contextlib.suppress(GrpoDistError):  # a lost process is reported by its other calls
            _take_peaks(self._peaks, group.role, await group.submit(rank, *PEAK).answer())


@blocking
async def peak_memory(groups: Sequence[WorkerGroup]) -> dict[str, float]:
    """Return the peak memory in GiB of the largest process of each role, resident and on GPU, once all have told it."""
    peaks: dict[str, float] = {}
    for group in groups:
        calls = [group.submit(rank, *PEAK) for rank in group.present]
        for parts in await group.answers(calls, MEMORY_TIMEOUT_S):
            _take_peaks(peaks, group.role, parts)
    return peaks


def _take_peaks(peaks: dict[str, float], role: str, parts: Mapping[str, float]) -> None:
    for kind, gib in parts.items():
        name = f"perf/{PEAK_MEMORY[kind]}/{role}"
        peaks[name] = max(peaks.get(name, 0.0), gib)


def num_devices(place: Placement, engines: int) -> int:
    """GPUs that the roles hold now that there are so many engines; on CPU the machines that the run was given."""
    joined = max(engines - place.num_engines, 0)
    return place.num_devices + (joined * place.tensor_parallel if place.device == "cuda" else 0)


def performance_metrics(
    timings: Mapping[str, float], metrics: Mapping[str, float], *, num_devices: int
) -> dict[str, float]:
    """Seconds per stage, and tokens per second: `perf/throughput` per device, as in verl, the others of all."""
    total, tokens = timings["step"], metrics["perf/total_num_tokens"]
    performance = {
        **{f"timing_s/{name}": seconds for name, seconds in timings.items()},
        "perf/time_per_step": total,
        "perf/throughput": tokens / total / num_devices,
        "perf/tokens_per_s": tokens / total,
    }
    if "gen" in timings:  # after resuming, all responses of a step may come from the checkpoint
        response, prompt = metrics["response_length/mean"], metrics["prompt_length/mean"]
        performance["perf/generation_tokens_per_s"] = tokens * response / (response + prompt) / timings["gen"]
    if "update_actor" in timings:  # while others warm up, the policy stands still
        performance["perf/update_tokens_per_s"] = tokens / timings["update_actor"]
    return performance


def zero_variance_share(scores: np.ndarray, uids: np.ndarray) -> float:
    """Share of groups whose scores are all the same, or are fewer than two, which gives them zero advantage."""
    groups = [scores[(uids == uid) & ~np.isnan(scores)] for uid in np.unique(uids)]
    return float(np.mean([len(np.unique(group)) < 2 for group in groups]))


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    known = values[~np.isnan(values)]
    numbers = {"mean": known.mean(), "max": known.max(), "min": known.min()} if len(known) else {}
    return {f"{name}/{what}": float(number) for what, number in numbers.items()}


ROUNDED = 16  # responses from all over the first batch that the trainer computes in another type too
NOT_COMPARED = "engine and trainer are not compared before the first update"


async def first_agreement(
    config: RunConfig, roles: Roles, batch: DataProtoRef, version: int
) -> tuple[dict[str, float], str]:
    """Compare the log-probs of engines and trainer on the first batch.

    Args:
        version: of the trainer's weights; tokens of older ones do not count.

    Returns:
        (metrics; what they say, and in a second line the worst token). Without metrics: why nothing is judged.
    """
    reasons = [*(f"actor_rollout_ref.rollout.{name}" for name in config.filters), *engine_of(config).inexact(config)]
    if config.algorithm.rollout_correction.bypass_mode:
        reasons = ["algorithm.rollout_correction.bypass_mode"]
    if reasons:
        return {}, f"{NOT_COMPARED}: {', '.join(reasons)}"
    if "old_log_probs" not in batch.columns:
        batch = batch.union(await roles.actor.compute_log_probs("old_log_prob", batch))
    tokens, mean, largest, worst = await roles.reward.compare_log_probs(batch, version)
    if not tokens:
        return {}, f"{NOT_COMPARED}: no token that trains was sampled by the present weights"
    rounding = None
    try:
        if dtype := other_type(config):
            rows = batch.reorder(np.linspace(0, len(batch) - 1, ROUNDED))
            rounded = await roles.actor.compute_log_probs("old_log_prob", rows, "compute_in_type", dtype)
            _, rounding, _, _ = await roles.reward.compare_log_probs(rows.replace(rounded), 0)
    except GrpoDistError as error:
        if isinstance(error, WorkerLost):
            raise
        return {}, f"{NOT_COMPARED}: passes in {dtype}, which show what rounding does, fail: {in_a_line(error)}"
    most, most_of_one = most_apart(rounding)
    measured = {"mean": mean, "max": largest, "of_limit": max(mean / most, largest / most_of_one)}
    left_out = "; those of older weights are left out" if (batch["weight_version"] < version).any() else ""
    limit = "" if math.isinf(most_of_one) else f" (limit {most_of_one:g})"
    text = (
        f"before the first update log-probs of engine and trainer differ by {mean:.2g} nats (limit {most:.2g}) on "
        f"average, and by up to {largest:.2g}{limit}, in {tokens:,} tokens{left_out}"
    )
    return {f"training/agreement/{name}": value for name, value in measured.items()}, f"{text}\n  worst: {worst}"
