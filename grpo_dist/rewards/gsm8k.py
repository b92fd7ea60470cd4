"""The GSM8K scorer: strict, the last `#### NUMBER` of the response; flexible, its last number.

    custom_reward_function.path=grpo_dist.rewards.gsm8k
    custom_reward_function.reward_kwargs='{method: flexible}'

After verl's `gsm8k.compute_score`. Strict: one space after the four signs, commas dropped, compared as text (so 18.0 is
not 18, as in lm-evaluation-harness's strict match). Departures from verl:

- the whole response is searched; verl searches the last 300 characters, so text after the answer can hide it;
- `#### $18` counts (verl drops the $ only after a pattern that cannot contain one);
- `#### 18.` and `#### 18,` count: punctuation that ends the sentence is no part of the number;
- flexible compares numbers, so 18.0 is right for 18, and it reads `10-4` as 10 and 4, not as 10 and -4.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from grpo_dist.rewards.base import SCORERS, check_choice

METHODS = ("strict", "flexible")
_ANSWER = re.compile(r"#### (-?\$?-?[0-9.,]+)")
_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
ANY_NUMBER = re.compile(
    r"(?:(?<![\w)])-\$?)?(?:(?:(?<![0-9])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def extract_answer(text: str, method: str = "strict") -> str | None:
    """The last `#### NUMBER` or, flexible, the last number, without commas, $ and final dot; None: there is none."""
    found = (_ANSWER if method == "strict" else ANY_NUMBER).findall(text)
    return _plain_number(found[-1]) if found else None


@SCORERS.register("openai/gsm8k", "gsm8k", "arithmetic")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    method: str = "strict",
    format_score: float = 0.0,
) -> dict[str, Any]:
    """Score the answer.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the number, as text or as a number.
        extra_info: not used.
        method: "strict" or "flexible".
        format_score: for an answer that is wrong, but in the right place.

    Returns:
        score: 1.0 for the right answer, `format_score` for another one, 0.0 for none; acc: 1.0 or 0.0; pred: the number
        found, or None.

    Raises:
        ValueError: the ground truth is not a number, so no response could be right.
    """
    if isinstance(ground_truth, float) and ground_truth.is_integer():
        ground_truth = int(ground_truth)
    truth = _plain_number(str(ground_truth).strip())
    if truth is None:
        raise ValueError(f"ground_truth {ground_truth!r} is not a number")
    answer = extract_answer(solution_str, method)
    right = answer is not None and (answer == truth or (method == "flexible" and Decimal(answer) == Decimal(truth)))
    score = 1.0 if right else format_score if answer is not None else 0.0
    return {"score": score, "acc": float(right), "pred": answer}


def check_reward_kwargs(*, method: str = "strict", format_score: float = 0.0) -> None:
    """Check the arguments before a run starts.

    Raises:
        ConfigError: there is no such method.
    """
    check_choice("method", method, METHODS)


def _plain_number(text: str) -> str | None:
    plain = text.replace(",", "").replace("$", "").removesuffix(".")
    return plain if _NUMBER.fullmatch(plain) else None
