"""A penalty for long responses: 0 up to a budget, growing to its full size at a limit.

    custom_reward_function.path=grpo_dist.rewards.weighted
    custom_reward_function.reward_kwargs='{functions: [
        {path: null},
        {path: examples/rewards/length_penalty.py, weight: 0.5, reward_kwargs: {budget: 200, limit: 400}}]}'

Write it on one line. `weighted` adds it to the built-in scorer (`path: null`). It counts words or characters of the
text; DAPO's penalty counts tokens: `reward.overlong_buffer`. The linear shape is DAPO's
(https://arxiv.org/abs/2503.14476), the cosine that of https://arxiv.org/abs/2502.03373.
"""

from __future__ import annotations

import math
from typing import Any

from grpo_dist.errors import ConfigError
from grpo_dist.rewards.contract import check_choice

UNITS = ("words", "characters")
SHAPES = ("linear", "cosine")


def penalty_share(length: int, budget: int, limit: int, shape: str = "linear") -> float:
    """The share of the full penalty: 0 up to `budget`, 1 from `limit` on, between them a line or half a cosine wave."""
    share = min(max((length - budget) / (limit - budget), 0.0), 1.0)
    return share if shape == "linear" else (1.0 - math.cos(math.pi * share)) / 2.0


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    *,
    budget: int,
    limit: int,
    unit: str = "words",
    shape: str = "linear",
) -> dict[str, float]:
    """The penalty, from 0 to -1.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: not used.
        extra_info: not used.
        budget: the longest response without a penalty.
        limit: the shortest response with the whole penalty.
        unit: "words" (between white space) or "characters".
        shape: "linear", or "cosine", which starts and ends gently.

    Returns:
        score, and `length` in `unit`.
    """
    length = len(solution_str.split()) if unit == "words" else len(solution_str)
    return {"score": 0.0 - penalty_share(length, budget, limit, shape), "length": float(length)}


def check_reward_kwargs(*, budget: int, limit: int, unit: str = "words", shape: str = "linear") -> None:
    """Check the arguments before a run starts.

    Raises:
        ConfigError: the limit is not above the budget, or there is no such unit or shape.
    """
    where = "custom_reward_function.reward_kwargs"
    for name, value in (("budget", budget), ("limit", limit)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{where}.{name}={value!r}: must be a number of {unit}, 0 or more")
    if limit <= budget:
        raise ConfigError(f"{where}.limit={limit}: must be greater than budget={budget}")
    check_choice("unit", unit, UNITS)
    check_choice("shape", shape, SHAPES)
