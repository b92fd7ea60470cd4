"""The log-probs of engines and trainer on a run's first batch, before the first update."""

from __future__ import annotations

import numpy as np

from grpo_dist.algorithms.agreement import most_apart
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import GrpoDistError, WorkerLost, in_a_line
from grpo_dist.plan.rules import inexact_arguments
from grpo_dist.roles.roles import Roles
from grpo_dist.runtime.batch_ref import DataProtoRef

# Responses from all over the batch that the trainer also computes in another type.
ROUNDED = 16
_NOT = "engine and trainer are not compared before the first update"


async def first_agreement(
    config: RunConfig, roles: Roles, batch: DataProtoRef, version: int
) -> tuple[dict[str, float], str]:
    """Compare a batch; `version` is of the trainer's weights, and tokens of older ones do not count.

    Returns:
        (metrics; what they say, and in a second line the worst token). Without metrics: why nothing is judged.
    """
    if why := why_not_compared(config):
        return {}, f"{_NOT}: {why}"
    if "old_log_probs" not in batch.columns:
        batch = batch.union(await roles.actor.compute_log_probs("old_log_prob", batch))
    tokens, mean, largest, worst = await roles.reward.compare_log_probs(batch, version)
    if not tokens:
        return {}, f"{_NOT}: no token that trains was sampled by the present weights"
    try:
        most, most_of_one = most_apart(await _rounding(config, roles, batch))
    except GrpoDistError as error:
        if isinstance(error, WorkerLost):
            raise
        return {}, f"{_NOT}: what rounding does is not known, since a pass in another type failed: {in_a_line(error)}"
    measured = {"mean": mean, "max": largest, "of_limit": max(mean / most, largest / most_of_one)}
    left_out = "; those of older weights are left out" if (batch["weight_version"] < version).any() else ""
    text = (
        f"before the first update log-probs of engine and trainer differ by {mean:.2g} nats (limit {most:.2g}) on "
        f"average, and by up to {largest:.2g} (limit {most_of_one:g}), in {tokens:,} tokens{left_out}"
    )
    return {f"training/agreement/{name}": value for name, value in measured.items()}, f"{text}\n  worst: {worst}"


def why_not_compared(config: RunConfig) -> str:
    """Return the settings by which both rightly differ, or are never compared; "" if there are none."""
    if config.algorithm.rollout_correction.bypass_mode:
        return "algorithm.rollout_correction.bypass_mode=true"
    names = [*config.filters, *(f"engine_kwargs.vllm.{name}" for name in inexact_arguments(config))]
    return ", ".join(f"actor_rollout_ref.rollout.{name}" for name in names)


async def _rounding(config: RunConfig, roles: Roles, batch: DataProtoRef) -> float | None:
    """Return how far the trainer's log-probs are apart on average from its own in float32, or in the engines' type if
    that alone is shorter; None: none is.
    """
    sections, default = config.actor_rollout_ref, config.default_dtype
    dtype = sections.rollout.resolved_dtype(default)
    if sections.actor.fsdp_config.resolved_dtype(default) != "fp32":
        dtype = "float32"
    elif dtype == "float32":
        return None
    rows = batch.reorder(np.linspace(0, len(batch) - 1, ROUNDED))
    rounded = await roles.actor.compute_log_probs("old_log_prob", rows, "compute_in_type", dtype)
    return (await roles.reward.compare_log_probs(rows.replace(rounded), 0))[1]
