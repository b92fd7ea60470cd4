"""A graded reward of your own: full marks for `#### NUMBER`, part of them for a number that comes near.

A model that solves nothing earns nothing from a strict scorer: all its groups score alike, and equal scores teach
nothing. A graded reward tells its responses apart. It also pays for guesses, so keep its part well below the full mark.
"""

from __future__ import annotations

import re
from typing import Any

from grpo_dist.tasks.gsm8k import extract_answer

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    partial_credit: float = 0.5,
) -> dict[str, float]:
    """Score one response.

    Args:
        data_source: the row's `data_source`.
        solution_str: the response, without the prompt.
        ground_truth: the row's `reward_model.ground_truth`, a number.
        extra_info: the row's `extra_info`.
        partial_credit: for the right number without the form; less, the farther off the response's last number is.

    Returns:
        score: 1, or at most `partial_credit`. The other values are logged as reward_extra/NAME/mean.
    """
    correct = extract_answer(solution_str) == str(ground_truth)
    near = closeness(solution_str, float(ground_truth))
    return {"score": 1.0 if correct else partial_credit * near, "acc": float(correct), "closeness": near}


def closeness(text: str, truth: float) -> float:
    """1 - relative distance of the text's last number from the truth, at least 0; 0 without a number."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return 0.0
    return max(0.0, 1.0 - abs(float(numbers[-1].replace(",", "")) - truth) / max(abs(truth), 1.0))
