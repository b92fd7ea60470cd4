"""Reward by how near the answer comes: exact, equal as a number, contained, or wrong.

    custom_reward_function.path=examples/rewards/graded.py
    custom_reward_function.reward_kwargs='{tag: answer}'                                2.0, 1.5, 0
    custom_reward_function.reward_kwargs='{tag: answer, exact: 1.0, numeric: 0.5, partial: 0.5, wrong: 0.01}'

The first scale is that of the widely copied GRPO tutorials on GSM8K, which pay for the only number of an answer ("6
apples" for 6), the second tiny-grpo's. They are used with the
format rewards of xml_tags.py, added by grpo_dist.rewards.weighted.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from grpo_dist.rewards.format import MINUS_SIGNS, accepted_answers, contains, last_tag_content
from grpo_dist.tasks.gsm8k import ANY_NUMBER

_NUMBER = re.compile(rf"(?:{ANY_NUMBER.pattern})(?:[eE][+-]?[0-9]{{1,3}}(?!\w))?")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    tag: str | None = None,
    exact: float = 2.0,
    numeric: float = 1.5,
    partial: float = 0.0,
    wrong: float = 0.0,
) -> dict[str, float]:
    """Grade the answer.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the answer, or a list of accepted ones, compared as text without surrounding white space.
        extra_info: not used.
        tag: the answer is what stands in the last `<tag>...</tag>`; without one in the response it is wrong. None: the
            whole response.
        exact: for the same text.
        numeric: for another text whose only number is the truth's only number: "1,000.0" and "1000 apples" for "1000".
            An answer with several numbers ("6 of 12") has none.
        partial: for any other answer in which the truth stands, as whole words and numbers.
        wrong: for anything else.

    Returns:
        score, and `acc`: 1 for an exact or numerically equal answer.

    Raises:
        ValueError: the ground truth is no text or number, or blank.
    """
    answer = (solution_str.strip() if tag is None else last_tag_content(solution_str, tag)) or ""
    truths = accepted_answers(ground_truth)
    if answer in truths:
        return {"score": exact, "acc": 1.0}
    if (number := _number(answer)) is not None and number in map(_number, truths):
        return {"score": numeric, "acc": 1.0}
    return {"score": partial if any(contains(answer, truth) for truth in truths) else wrong, "acc": 0.0}


def _number(text: str) -> Decimal | None:
    """The only number of a text; None where there is none, or more than one."""
    found = _NUMBER.findall(text.translate(MINUS_SIGNS))
    return Decimal(found[0].replace(",", "").replace("$", "")) if len(found) == 1 else None
