"""Several reward functions at once: the score is their weighted sum, each one's score is logged.

    custom_reward_function.path=grpo_dist.rewards.weighted
    custom_reward_function.reward_kwargs='{functions: [
        {path: examples/rewards/graded.py, weight: 1.0, reward_kwargs: {tag: answer}},
        {path: examples/rewards/xml_tags.py, weight: 0.5},
        {path: my_reward.py, name: politeness, weight: 0.1, label: polite}]}'

`path: null` is the built-in scorer of the row's data source. The functions are the components that
`adv_estimator=gdpo` normalises, and their weights its default weights.

Where functions judge steps, so does the sum: a step's score is the weighted sum of theirs, and what judges the whole
response counts at its last step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from grpo_dist.errors import ConfigError
from grpo_dist.rewards.base import RewardFunction, score_response

KEY = "custom_reward_function.reward_kwargs.functions"
FIELDS = {"path", "name", "weight", "reward_kwargs", "label"}


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    functions: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The weighted sum.

    Args:
        data_source: of the row.
        solution_str: the response.
        ground_truth: of the row.
        extra_info: of the row.
        functions: each with `path`, `name` (compute_score), `weight` (1), `reward_kwargs` ({}) and `label` (the last
            part of its path), as in `custom_reward_function`.

    Returns:
        score, each function's score under its label, and their extra values as `LABEL.NAME`; `acc` of the first that
        gives it, and `pred` of the first that finds an answer. If a function judges steps also `step_scores`, and its
        own ones as `LABEL.step_scores`.

    Raises:
        RewardError: one of them failed; see `score_response`.
        ValueError: two of them judge another number of steps.
    """
    total = 0.0
    found: dict[str, Any] = {}
    whole = 0.0  # what judges the whole response
    judged: list[tuple[str, float, tuple[float, ...]]] = []
    for label, function, weight in _loaded(functions):
        result = score_response(
            function,
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=extra_info,
        )
        total += weight * result.score
        if result.step_scores is None:
            whole += weight * result.score
        else:
            judged.append((label, weight, result.step_scores))
        if result.pred is not None:
            found.setdefault("pred", result.pred)
        if "acc" in result.extra:
            found.setdefault("acc", result.extra["acc"])
        found |= {label: result.score, **{f"{label}.{name}": value for name, value in result.extra.items()}}
    return found | {"score": total} | _steps(judged, whole)


def _steps(judged: Sequence[tuple[str, float, tuple[float, ...]]], whole: float) -> dict[str, Any]:
    """The scores of steps: of each function (label, weight, scores) that judges them, and their sum."""
    if not judged:
        return {}
    counts = {label: len(scores) for label, _, scores in judged}
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{label} {count}" for label, count in counts.items())
        raise ValueError(f"the functions judge different numbers of steps of a response: {numbers}")
    weights = [weight for _, weight, _ in judged]
    by_step = zip(*(scores for *_, scores in judged), strict=True)
    sums = [math.fsum(weight * score for weight, score in zip(weights, step, strict=True)) for step in by_step]
    if sums:
        sums[-1] += whole
    return {"step_scores": sums} | {f"{label}.step_scores": list(scores) for label, _, scores in judged}


def check_reward_kwargs(*, functions: Sequence[Mapping[str, Any]]) -> None:
    """Load all functions before a run starts.

    Raises:
        ConfigError: one of them cannot be loaded, or has a field that does not exist.
    """
    _loaded(functions)


def declare_components(*, functions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The weight of each function, by its label."""
    return {label: weight for label, _, weight in _loaded(functions)}


def _loaded(functions: Sequence[Mapping[str, Any]]) -> list[tuple[str, RewardFunction, float]]:
    """The functions with their labels and weights; loaded once."""
    return _load(json.dumps([dict(each) for each in functions], default=str))


@cache
def _load(text: str) -> list[tuple[str, RewardFunction, float]]:
    from grpo_dist.rewards.load import load_reward_function

    loaded: dict[str, tuple[str, RewardFunction, float]] = {}
    for i, each in enumerate(json.loads(text)):
        unknown = sorted(each.keys() - FIELDS)
        if unknown or "path" not in each:
            what = f"has no field {unknown[0]!r}" if unknown else "needs a path"
            raise ConfigError(f"{KEY}[{i}] {what}; the fields are {', '.join(sorted(FIELDS))}")
        path = each["path"]
        label = each.get("label") or (str(path).removesuffix(".py").replace("/", ".").rpartition(".")[2])
        weight = each.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"{KEY}[{i}].weight={weight!r}: must be a number")
        if label in loaded:
            raise ConfigError(f"{KEY}[{i}]: a second reward called {label!r}; give it another label")
        function = load_reward_function(path, each.get("name", "compute_score"), each.get("reward_kwargs") or {})
        if function.form != "response" or function.is_async:
            raise ConfigError(f"{KEY}[{i}]: {function.name} must be a plain function of one response")
        loaded[label] = (label, function, float(weight))
    if not loaded:
        raise ConfigError(f"{KEY}: names no function")
    return list(loaded.values())
