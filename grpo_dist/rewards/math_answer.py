r"""Reward for the final answer of a mathematics problem, compared as mathematics: 1/2, 0.5 and \frac12 are the same.

    (built in for MATH, MATH-500, DAPO-Math and AIME)
    custom_reward_function.path=grpo_dist.rewards.math_answer
    custom_reward_function.reward_kwargs='{wrong: -1.0}'

The answer is the last `\boxed{...}`; without one, what follows the last "Answer:" or "answer is" on its line. Nothing
else of the response counts, so that a list of guesses earns nothing. The comparison is the math-verify library's
(https://github.com/huggingface/Math-Verify), without its timeouts: they need signals and the main thread, and the pool
of reward processes has its own. Departures from verl's scorers, which compare normalised text: equal values count, and
the whole response is searched, not the last 300 characters.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from grpo_dist.boxed import last_boxed
from grpo_dist.rewards.base import SCORERS
from grpo_dist.rewards.latex_size import latex_size

MOST_CHARACTERS = 500  # of an answer; longer ones are compared as text
_STATED = re.compile(r"answer[*_\s]*(?::|is\b)[*_\s:]*", re.IGNORECASE)
# What may be written differently without another meaning, and how it is compared.
_WRITTEN = (
    (re.compile(r"\\[dt](?=frac|binom)"), r"\\"),
    (re.compile(r"\\(?:cdot|times)(?![a-zA-Z])"), "*"),
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]|(?<![0-9])[\s~]+|[\s~]+(?![0-9])"), ""),
    (re.compile(r"\{(\w)\}"), r"\1"),
)


def extract_answer(text: str) -> str | None:
    r"""The last `\boxed{...}`; else the rest of the line after the last "Answer:" or "answer is"; None: neither."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    stated = list(_STATED.finditer(text))
    return text[stated[-1].end() :].partition("\n")[0].strip().rstrip("*_.").strip() or None if stated else None


def same_value(answer: str, truth: str) -> bool:
    r"""Whether two LaTeX texts are the same: as text or, where that is no, as mathematics.

    An answer of more than `MOST_CHARACTERS`, and either of them whose value or expansion would be astronomic (9^{9^9},
    (x+y+z)^{99}; see latex_size.py), is compared as text only, whatever spaces, \left and \cdot it is written with.

    Raises:
        ValueError: the truth cannot be read as mathematics, so no other way of writing it could be right.
    """
    answer, truth = _plain(answer), _plain(truth)
    if answer == truth or not answer:
        return bool(answer)
    if len(answer) > MOST_CHARACTERS or is_too_large(answer) or is_too_large(truth):
        return _normal(answer) == _normal(truth)
    from math_verify import parse, verify  # seconds to import

    expected = _parsed_truth(truth)
    found = parse(f"${answer}$", parsing_timeout=None)
    return bool(verify(list(expected), found, timeout_seconds=None))


@SCORERS.register("DigitalLearningGmbH/MATH-lighteval", "lighteval/MATH", "HuggingFaceH4/MATH-500")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    right: float = 1.0,
    wrong: float = 0.0,
) -> dict[str, Any]:
    """Compare the final answer with the truth.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the answer in LaTeX, without a box, or a number.
        extra_info: not used.
        right: the score of a right answer.
        wrong: the score of a wrong answer, and of none.

    Returns:
        score, `acc` (0 or 1) and `pred`, the answer as text ("" for none).

    Raises:
        ValueError: the ground truth is empty, or cannot be read.
    """
    truth = str(ground_truth).strip()
    if ground_truth is None or not _plain(truth):
        raise ValueError(f"ground_truth {ground_truth!r} holds no answer")
    answer = extract_answer(solution_str)
    correct = answer is not None and same_value(answer, truth)
    return {"score": right if correct else wrong, "acc": float(correct), "pred": answer or ""}


@SCORERS.register("math_dapo", "math", "math_dapo_reasoning", "aime24", "aime25", "aime2024", "aime2025")
@SCORERS.register("aime_2024", "aime_2025", "HuggingFaceH4/aime_2024", "Maxwell-Jia/AIME_2024", "yentinglin/aime_2025")
def compute_score_dapo(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """As `compute_score`, with DAPO's scale: 1 for right, -1 for wrong."""
    return compute_score(data_source, solution_str, ground_truth, extra_info, wrong=-1.0)


@lru_cache(maxsize=1024)  # the responses of a group have one truth
def is_too_large(text: str) -> bool:
    """Whether to evaluate a text may take very long or very much memory, as it stands or as math-verify rewrites it."""
    if latex_size(text).too_large:
        return True
    from latex2sympy2_extended import normalize_latex
    from math_verify import LatexExtractionConfig

    return latex_size(normalize_latex(text, config=LatexExtractionConfig().normalization_config)).too_large


def _normal(text: str) -> str:
    """Without spacing, the size of brackets, and braces around one character; one sign for a product."""
    for written, normal in _WRITTEN:
        text = written.sub(normal, text)
    return text


def _plain(text: str) -> str:
    """Without dollar signs, LaTeX's forced spaces and surrounding white space."""
    return re.sub(r"\\\$|\$|\\[!,;]\s*", "", text).strip()


@lru_cache(maxsize=1024)  # the responses of a group have one truth
def _parsed_truth(truth: str) -> tuple[Any, ...]:
    from math_verify import parse

    for name in ("math_verify.parser", "math_verify.grader"):  # each process would say that it has no timeout
        logging.getLogger(name).setLevel(logging.ERROR)
    expected = parse(f"${truth}$", parsing_timeout=None)
    if not expected:
        raise ValueError(f"ground_truth {truth!r} cannot be read as mathematics")
    return tuple(expected)
