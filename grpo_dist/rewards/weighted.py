"""Several reward functions at once: the score is their weighted sum, each one's score is logged.

    custom_reward_function.path='[rewards.py:correct, rewards.py:short]' custom_reward_function.weights='[1.0, 0.5]'

is short for

    custom_reward_function.path=grpo_dist.rewards.weighted
    custom_reward_function.reward_kwargs='{functions: [
        {path: rewards.py:correct, weight: 1.0}, {path: rewards.py:short, weight: 0.5}]}'

and an entry may also have `name`, `reward_kwargs` and `label`, in either way of writing. `path: null` is the built-in
scorer of the row's data source. The functions may have any of the forms of forms.py. They are the components that
`adv_estimator=gdpo` normalises, and their weights its default weights.

A function that returns None for a response does not apply to it and takes no part in its sum; a response to which none
applies has failed.

Where functions judge steps, so does the sum: a step's score is the weighted sum of theirs, and what judges the whole
response counts at its last step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from grpo_dist.code_names import parse_code
from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.rewards.base import Part
from grpo_dist.rewards.weighted_sum import weighted_sum

KEY = "custom_reward_function.reward_kwargs.functions"
FIELDS = {"path", "name", "weight", "reward_kwargs", "label"}


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    functions: Sequence[Mapping[str, Any]],
    key: str = KEY,
) -> dict[str, Any]:
    """The weighted sum for one response.

    Args:
        data_source: of the row.
        solution_str: the response.
        ground_truth: of the row.
        extra_info: of the row.
        functions: each with `path`, `name` (compute_score), `weight` (1), `reward_kwargs` ({}) and `label` (the
            function's name where the path has it, else the last part of the path), as in `custom_reward_function`.
        key: the config key that lists them, for messages.

    Returns:
        See `weighted_sum`.

    Raises:
        RewardError: one of them failed, or none applies.
    """
    from grpo_dist.rewards.forms import Failure, Sample, score_group

    parts, results = reward_parts(functions=functions, key=key), []
    for part in parts:
        (result,) = score_group(part.function, [Sample(solution_str, data_source, ground_truth, dict(extra_info), [])])
        if isinstance(result, Failure):
            raise RewardError(result.text)
        results.append(result)
    return weighted_sum(parts, results)


def declare_components(*, functions: Sequence[Mapping[str, Any]], key: str = KEY) -> dict[str, float]:
    """The weight of each function, by its label."""
    return {part.label: part.weight for part in reward_parts(functions=functions, key=key)}


def reward_parts(*, functions: Sequence[Mapping[str, Any]], key: str = KEY) -> list[Part]:
    """The functions; loaded once. Takes the arguments of `compute_score`.

    Raises:
        ConfigError: one of them cannot be loaded, or has a field that does not exist.
    """
    return _load(json.dumps([dict(each) for each in functions], default=str), key)


@cache
def _load(text: str, key: str) -> list[Part]:
    from grpo_dist.rewards.load import load_reward_function

    loaded: dict[str, Part] = {}
    for i, each in enumerate(json.loads(text)):
        unknown = sorted(each.keys() - FIELDS)
        if unknown or "path" not in each:
            what = f"has no field {unknown[0]!r}" if unknown else "needs a path"
            raise ConfigError(f"{key}[{i}] {what}; the fields are {', '.join(sorted(FIELDS))}")
        path = each["path"]
        code = parse_code(str(path))
        label = each.get("label") or code.attribute
        label = label or code.source.removesuffix(".py").replace("/", ".").rpartition(".")[2]
        weight = each.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"{key}[{i}].weight={weight!r}: must be a number")
        if label in loaded:
            remedy = f"give it another label, as {{path: {path}, label: ...}}"
            raise ConfigError(f"{key}[{i}]: a second reward called {label!r}; {remedy}")
        function = load_reward_function(path, each.get("name", "compute_score"), each.get("reward_kwargs") or {})
        if function.parts:
            raise ConfigError(f"{key}[{i}]: {function.name} is a sum itself; list its functions here")
        loaded[label] = Part(label, replace(function, is_part=True), float(weight))
    if not loaded:
        raise ConfigError(f"{key}: names no function")
    return list(loaded.values())
