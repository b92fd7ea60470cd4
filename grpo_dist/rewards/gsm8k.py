"""The strict GSM8K scorer: the last `#### NUMBER` of the response must be the ground truth.

After verl's `gsm8k.compute_score(method="strict")`: one space after the four signs, commas dropped, compared
as text (so 18.0 is not 18, as in lm-evaluation-harness's strict match). Departures from verl:

- the whole response is searched; verl searches the last 300 characters, so text after the answer can hide it;
- `#### $18` counts (verl drops the $ only after a pattern that cannot contain one);
- `#### 18.` and `#### 18,` count: punctuation that ends the sentence is no part of the number.
"""

from __future__ import annotations

import re
from typing import Any

from grpo_dist.rewards.base import SCORERS

_ANSWER = re.compile(r"#### (-?\$?-?[0-9.,]+)")
_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")


def extract_answer(text: str) -> str | None:
    """The number of the last `#### NUMBER`, without commas, $ and final dot; None: there is none."""
    found = _ANSWER.findall(text)
    return _plain_number(found[-1]) if found else None


@SCORERS.register("openai/gsm8k", "gsm8k", "arithmetic")
def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """1.0 if the last `#### NUMBER` equals the ground truth (text or a number), else 0.0.

    Returns:
        score and acc, the same; pred: the number found, or None.

    Raises:
        ValueError: the ground truth is not a number, so no response could be right.
    """
    if isinstance(ground_truth, float) and ground_truth.is_integer():
        ground_truth = int(ground_truth)
    truth = _plain_number(str(ground_truth).strip())
    if truth is None:
        raise ValueError(f"ground_truth {ground_truth!r} is not a number")
    answer = extract_answer(solution_str)
    right = 1.0 if answer == truth else 0.0
    return {"score": right, "acc": right, "pred": answer}


def _plain_number(text: str) -> str | None:
    plain = text.replace(",", "").replace("$", "").removesuffix(".")
    return plain if _NUMBER.fullmatch(plain) else None
