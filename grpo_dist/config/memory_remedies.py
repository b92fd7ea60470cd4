"""Finds settings with which a run fits in memory. Each one is tried: the memory is estimated again with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from grpo_dist.config.problems import shown, with_value
from grpo_dist.config.schema_job import JobConfig

Config = TypeVar("Config", bound=JobConfig)
Settings = Mapping[str, list[Any]]
Excess = Callable[[Config], float]


def fitting_settings(
    config: Config, settings: Settings, more_gpus: Settings, excess: Excess[Config], alternative: Settings | None = None
) -> str:
    """One setting that makes the run fit, else the fewest and mildest several, else more GPUs, as overrides.

    Args:
        config: the run's config.
        settings: values to try by key, cheapest key and mildest value first.
        more_gpus: likewise, tried after those.
        excess: GiB by which the run of a config exceeds the memory; infinite if the config is invalid.
        alternative: a setting that is offered beside several others.

    Returns:
        The overrides; "" if there are none with which it fits.
    """
    found = _first(config, settings, excess) or _several(config, settings, excess) or _first(config, more_gpus, excess)
    if found:
        return found
    several = _several(config, {**settings, **more_gpus}, excess)
    return ", or ".join(filter(None, (several, _first(config, alternative or {}, excess))))


def _first(config: Config, changes: Settings, excess: Excess[Config]) -> str:
    """The first single change that suffices, as an override; "" if there is none."""
    tries = ((key, value) for key, values in changes.items() for value in values)
    return next((f"{key}={shown(value)}" for key, value in tries if not excess(_with(config, {key: value}))), "")


def _several(config: Config, changes: Settings, excess: Excess[Config]) -> str:
    """Several changes that suffice together, each of which saves memory; "" if even all of them do not suffice."""
    taken: dict[str, Any] = {}
    left = excess(config)
    for key, values in changes.items():
        found = [(excess(_with(config, taken | {key: value})), value) for value in values]
        best = min(found, key=lambda each: each[0], default=(left, None))
        if best[0] < left:
            left, taken[key] = best
        if not left:
            needed = _milder_still(config, taken, changes, excess)
            return " and ".join(f"{name}={shown(value)}" for name, value in needed.items())
    return ""


def _milder_still(config: Config, taken: dict[str, Any], changes: Settings, excess: Excess[Config]) -> dict[str, Any]:
    """Drop the changes that are not needed, and weaken the others as far as possible."""
    for key in list(taken):
        rest = {name: value for name, value in taken.items() if name != key}
        tries = [rest, *(rest | {key: value} for value in changes[key])]
        taken = next(each for each in tries if not excess(_with(config, each)))
    return taken


def _with(config: Config, changes: Mapping[str, Any]) -> Config:
    for key, value in changes.items():
        config = with_value(config, key, value)
    return config
