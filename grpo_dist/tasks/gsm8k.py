r"""GSM8K (https://arxiv.org/abs/2110.14168): grade school mathematics, 7,473 training and 1,319 test questions.

The rows and the scorer (docs/rewards.md#the-scorers), which follows verl's `gsm8k.compute_score`. Strict: one space
after the four signs, commas dropped, compared as text, so that 18.0 is not 18 (as in lm-evaluation-harness's strict
match). Departures from verl:

- the whole response is searched; verl searches the last 300 characters, so text after the answer can hide it;
- `#### $18` counts (verl drops the $ only after a pattern that cannot contain one);
- `#### 18.` and `#### 18,` count: punctuation that ends the sentence is no part of the number;
- `#### +18` counts, and every kind of minus sign is one;
- what goes on (`1/2`, `5 - 7`, `5 1/2`, `5 million`, `1e3`) or is none (`3,5`) is no such number; verl reads 1, 5, 35;
- flexible compares numbers, so 18.0 is right for 18, and it reads `10-4` as 10 and 4, not as 10 and -4.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from grpo_dist.data.conversion import Row, require_text, verl_row
from grpo_dist.errors import DataError
from grpo_dist.rewards.contract import check_choice
from grpo_dist.rewards.format import MINUS_SIGNS

HUB = ("openai/gsm8k", "main")  # name and configuration on the Hugging Face hub
# verl's wording, so that results can be compared with its published ones.
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
METHODS = ("strict", "flexible")
_ANSWER = re.compile(
    r"#### ([-+]?\$?[-+]?[0-9.,]++)(?![eEx][-+]?[0-9]|[kK]\b|[ \t]*(?:[-+*/^:×÷x][ \t]*[0-9(]|[0-9¼-¾⅐-⅞²³¹⁰-⁹]"
    r"|\\[dt]?frac|(?i:and a half|half|dozen|hundred|thousand|[mbtr]+illion)s?\b))"
)
_NUMBER = re.compile(r"-?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
ANY_NUMBER = re.compile(
    r"(?:(?<![\w)])-\$?)?(?:(?:(?<![0-9])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def make_row(example: Row, *, split: str, index: int, location: str) -> Row:
    """One GSM8K example, the texts "question" and "answer" (which ends in `#### NUMBER`), in verl's schema.

    Raises:
        DataError: a field is missing, or the answer has no `#### NUMBER`.
    """
    require_text(example, ("question", "answer"), location)
    question, answer = example["question"], example["answer"]
    match = re.search(r"#### (-?[0-9.,]+)", answer)
    if match is None:
        raise DataError(f"{location}: the answer has no '#### NUMBER': ...{answer[-80:]!r}")
    extra = {"split": split, "index": index, "answer": answer, "question": question}
    return verl_row(HUB[0], f"{question} {INSTRUCTION}", match.group(1).replace(",", ""), **extra)


def extract_answer(text: str, method: str = "strict") -> str | None:
    """Return the last `#### NUMBER` or, flexible, the last number, without commas, $, + and final dot, or None."""
    numbers = (_ANSWER if method == "strict" else ANY_NUMBER).findall(text.translate(MINUS_SIGNS))
    return _plain_number(numbers[-1]) if numbers else None


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
        ground_truth: the number, as text or as a number.
        format_score: for an answer that is wrong, but in the right place.

    Returns:
        score: 1.0 for the right answer, `format_score` for another, 0.0 for none; acc: 1.0 or 0.0; pred: it, or None.

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
    """Check the arguments before a run starts; a ConfigError if there is no such method."""
    check_choice("method", method, METHODS)


def _plain_number(text: str) -> str | None:
    plain = text.translate(MINUS_SIGNS).replace("$", "").rstrip(",").removesuffix(".").rstrip(",").removeprefix("+")
    return plain.replace(",", "") if _NUMBER.fullmatch(plain) else None
