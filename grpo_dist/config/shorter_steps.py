"""Finds placements and settings with which a step would be shorter, by the estimate of step_estimate.py."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_dist.config.grpo import GRPO
from grpo_dist.config.memory import memory_estimate
from grpo_dist.config.memory_rules import fits
from grpo_dist.config.placement import placement
from grpo_dist.config.problems import shown, value_of, with_value
from grpo_dist.config.processor import physical_cores
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.step_estimate import GPU_GIB, step_estimate
from grpo_dist.config.step_rates import MachineRates

# Smaller savings are within the error of the estimate.
LEAST_SAVING = 0.1
# Sizes of the actor that are tried at most.
_SIZES = 16

Changes = dict[str, Any]
_WORLD_SIZES = (
    "cluster.actor_world_size",
    "cluster.rollout_world_size",
    "cluster.ref_world_size",
    "cluster.reward_model_world_size",
    "cluster.critic_world_size",
)
_SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"


def shorter_steps(
    config: RunConfig, model_config: Mapping[str, Any] | None, now: float, machine: MachineRates | None
) -> list[tuple[float, str]]:
    """The best change of each kind that fits in memory and shortens the step by at least `LEAST_SAVING`.

    Args:
        config: the run's config.
        model_config: the model's config.json.
        now: estimated seconds of a step with this config.
        machine: the rates of the machine.

    Returns:
        (seconds, overrides) of each change, shortest step first.
    """
    if placement(config).shares_gpu:
        return []
    best = functools.partial(_best, config, model_config, machine)
    ahead: Changes = {"trainer.max_staleness": max(config.trainer.max_staleness, 1)}
    together: Sequence[Changes] = []
    if config.device == "cpu":
        splits = [{_WORLD_SIZES[0]: size} for size in range(1, min(physical_cores(), _SIZES) + 1)]
    else:
        free: Changes = dict.fromkeys(_WORLD_SIZES)
        some = max(1, config.num_gpus // _SIZES)
        splits = [free | {_WORLD_SIZES[0]: size} for size in range(some, config.num_gpus, some)]
        together = [free | {"cluster.colocate": "all", _SHARE: 0.5}]
    single = [*best([ahead], now), *best(splits, now)]
    both = best([ahead | split for split in splits], min((seconds for seconds, _ in single), default=now))
    return sorted([*single, *both, *best(together, now)])


def _best(
    config: RunConfig,
    model_config: Mapping[str, Any] | None,
    machine: MachineRates | None,
    kind: Sequence[Changes],
    now: float,
) -> list[tuple[float, str]]:
    """The change among `kind` with the shortest step, if it saves enough; [] otherwise."""
    memory = functools.partial(memory_estimate, model_config=model_config)
    gib, found = config.cluster.gpu_memory_gib or GPU_GIB, []
    for changes in kind:
        changed = config
        for key, value in changes.items():
            changed = with_value(changed, key, value)
        estimate = step_estimate(changed, model_config, machine)
        if estimate is None or estimate.total > now * (1 - LEAST_SAVING):
            continue
        unsized = with_value(changed, "cluster.gpu_memory_gib", None)  # skips the search for memory remedies
        if not GRPO.problems(unsized) and fits(changed, memory, gib):
            new = [f"{key}={shown(value)}" for key, value in changes.items() if value != value_of(config, key)]
            found.append((estimate.total, " and ".join(new)))
    return sorted(found)[:1]
