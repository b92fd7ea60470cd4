"""A reward of your own: full marks for `#### NUMBER`, part of them for a right number said in another way.

A model that has never seen the form earns nothing from a strict scorer, so all its groups score alike and teach
nothing. Partial credit gives it a way up.
"""

from __future__ import annotations

import re
from typing import Any

from grpo_dist.rewards.gsm8k import extract_answer

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    answer_credit: float = 0.5,
    form_credit: float = 0.1,
) -> dict[str, float]:
    """Score one response.

    Args:
        data_source: the row's `data_source`.
        solution_str: the response, without the prompt.
        ground_truth: the row's `reward_model.ground_truth`.
        extra_info: the row's `extra_info`.
        answer_credit: for a response whose last number is right but not in the form.
        form_credit: for a wrong number in the form.

    Returns:
        score: 1, `answer_credit`, `form_credit` or 0. The other values are logged as reward_extra/NAME/mean.
    """
    truth = str(ground_truth)
    in_form = extract_answer(solution_str)
    numbers = [number.replace(",", "") for number in _NUMBER.findall(solution_str)]
    right = numbers[-1:] == [truth]
    if in_form is not None:
        score = 1.0 if in_form == truth else form_credit
    else:
        score = answer_credit if right else 0.0
    return {"score": score, "acc": float(in_form == truth), "right_number": float(right)}
