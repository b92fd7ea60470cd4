"""Several reward functions at once: the score is their weighted sum, each one's score is logged.

    custom_reward_function.path='[rewards.py:correct, rewards.py:short]' custom_reward_function.weights='[1.0, 0.5]'

is short for

    custom_reward_function.path=grpo_dist.rewards.weighted
    custom_reward_function.reward_kwargs='{functions: [
        {path: rewards.py:correct, weight: 1.0}, {path: rewards.py:short, weight: 0.5}]}'

and an entry may also have `name`, `reward_kwargs` and `label`, in either way of writing. `path: null` is the built-in
scorer of the row's data source. The functions may have any of the forms of contract.py. They are the components that
`adv_estimator=gdpo` normalises, and their weights its default weights.

A function that returns None for a response takes no part in its sum; a response to which none applies has no score.

Where functions judge steps, a step's score is their weighted sum, and what judges whole responses counts at the last.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.plugins.names import OVERLONG_PENALTY, parse_code
from grpo_dist.rewards.contract import Failure, Part, Sample, score_group, weighted_sum
from grpo_dist.rewards.load import load_reward_function

KEY = "custom_reward_function.reward_kwargs.functions"
GDPO_KEYS, GDPO_WEIGHTS = "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"
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
    """Return the weighted sum for one response; see `weighted_sum` for what is in it.

    Args:
        functions: each with `path`, `name` (compute_score), `weight` (1), `reward_kwargs` ({}) and `label` (the
            function's name where the path has it, else the last part of the path), as in `custom_reward_function`.
    """
    parts, results = reward_parts(functions=functions, key=key), []
    for part in parts:
        (result,) = score_group(part.function, [Sample(solution_str, data_source, ground_truth, dict(extra_info), [])])
        if isinstance(result, Failure):
            raise RewardError(result.text)
        results.append(result)
    return weighted_sum(parts, results)


def declare_components(*, functions: Sequence[Mapping[str, Any]], key: str = KEY) -> dict[str, float]:
    """Return the weight of each function, by its label."""
    return {part.label: part.weight for part in reward_parts(functions=functions, key=key)}


def reward_parts(*, functions: Sequence[Mapping[str, Any]], key: str = KEY) -> list[Part]:
    """Return the functions, loaded once. Takes the arguments of `compute_score`."""
    return _load(json.dumps([dict(entry) for entry in functions], default=str), key)


@cache
def _load(text: str, key: str) -> list[Part]:
    loaded: dict[str, Part] = {}
    for i, entry in enumerate(json.loads(text)):
        unknown = sorted(entry.keys() - FIELDS)
        if unknown or "path" not in entry:
            what = f"has no field {unknown[0]!r}" if unknown else "needs a path"
            raise ConfigError(f"{key}[{i}] {what}; the fields are {', '.join(sorted(FIELDS))}")
        path = entry["path"]
        code = parse_code(str(path))
        label = entry.get("label") or code.attribute
        label = label or code.source.removesuffix(".py").replace("/", ".").rpartition(".")[2]
        weight = entry.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"{key}[{i}].weight={weight!r}: must be a number")
        if label in loaded:
            remedy = f"give it another label, as {{path: {path}, label: ...}}"
            raise ConfigError(f"{key}[{i}]: a second reward called {label!r}; {remedy}")
        function = load_reward_function(path, entry.get("name", "compute_score"), entry.get("reward_kwargs") or {})
        if function.parts:
            raise ConfigError(f"{key}[{i}]: {function.name} is a sum itself; list its functions here")
        loaded[label] = Part(label, replace(function, is_part=True), float(weight))
    if not loaded:
        raise ConfigError(f"{key}: names no function")
    return list(loaded.values())


def chosen_components(
    keys: Sequence[str] | None,
    weights: Sequence[float] | None,
    *,
    declared: Mapping[str, float],
    overlong_penalty: bool,
    returned: Iterable[str] = (),
) -> dict[str, float]:
    """Return the components of the reward that `adv_estimator=gdpo` compares by name, in order, with their weights.

    Args:
        keys: `algorithm.gdpo_reward_keys`; None: those declared, and the overlong penalty if there is one.
        weights: `algorithm.gdpo_reward_weights`; None: those declared, and 1 for the others.
        declared: the components that the reward function declares, with their weights.
        overlong_penalty: whether `reward.overlong_buffer` is enabled.
        returned: the names of the values that the function has returned beside the score, if known; for messages.

    Raises:
        ConfigError: there are no components, a key is not among the declared ones, or keys and weights differ.
    """
    known = {**declared, **({OVERLONG_PENALTY: 1.0} if overlong_penalty else {})}
    if keys is None and not declared:
        names = sorted(set(returned) - {OVERLONG_PENALTY})
        values = f", which returns {', '.join(names)}" if names else ""
        raise ConfigError(
            f"{GDPO_KEYS}=null: the reward function declares no components{values}; name those of its values that gdpo "
            "is to compare, or set custom_reward_function.path=grpo_dist.rewards.weighted, whose functions are "
            "components"
        )
    chosen = tuple(known) if keys is None else keys
    for key in chosen:
        if declared and key not in known and key.partition(".")[0] not in declared:  # LABEL.NAME: a value beside it
            raise ConfigError(
                f"{GDPO_KEYS}={','.join(chosen)}: {key} is no component; the reward has {', '.join(known)}"
            )
    if weights is not None and len(weights) != len(chosen):
        raise ConfigError(
            f"{GDPO_WEIGHTS}: {len(weights)} weights for the {len(chosen)} components {', '.join(chosen)}"
        )
    return dict(zip(chosen, weights or [known.get(key, 1.0) for key in chosen], strict=True))
