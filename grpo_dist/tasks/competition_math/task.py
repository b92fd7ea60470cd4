r"""MATH (https://arxiv.org/abs/2103.03874): competition mathematics, 7,500 training and 5,000 test problems.

    python -m grpo_dist.tasks.prepare math --local_save_dir data/math       the rows
    custom_reward_function.path=grpo_dist.tasks.competition_math            the scorer, with settings of your own
    custom_reward_function.reward_kwargs='{wrong: -1.0}'

The scorer compares final answers as mathematics: 1/2, 0.5 and \frac12 are the same. It is built in for MATH, MATH-500,
DAPO-Math and AIME. The answer is the last `\boxed{...}`; without one, what follows the last "Answer:" or "answer is"
on its line. Nothing else of the response counts, so that a list of guesses earns nothing. The comparison is the
math-verify library's (https://github.com/huggingface/Math-Verify), without its timeouts: they need signals and the main
thread, and the reward processes have a time limit of their own. Departures from verl's scorers, which compare
normalised text: equal values count, and the whole response is searched, not the last 300 characters.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from grpo_dist.data.conversion import Row, require_text
from grpo_dist.errors import DataError
from grpo_dist.tasks.competition_math.boxed import last_boxed
from grpo_dist.tasks.competition_math.latex_size import latex_size

HUB = ("DigitalLearningGmbH/MATH-lighteval", "default")  # name and configuration on the Hugging Face hub
# verl's wording, so that results can be compared with its published ones.
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
MOST_CHARACTERS = 500  # of an answer; longer ones are compared as text
_STATED = re.compile(r"answer[*_\s]*(?::|is\b)[*_\s:]*", re.IGNORECASE)
# What may be written differently without another meaning, and how it is compared.
_WRITTEN = (
    (re.compile(r"\\[dt](?=frac|binom)"), r"\\"),
    (re.compile(r"\\(?:cdot|times)(?![a-zA-Z])"), "*"),
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]|(?<![0-9])[\s~]+|[\s~]+(?![0-9])"), ""),
    (re.compile(r"\{(\w)\}"), r"\1"),
)


def make_row(example: Row, *, split: str, index: int, location: str) -> Row:
    r"""One MATH example in verl's schema; the ground truth is what stands in the last `\boxed{...}` of the solution.

    Args:
        example: "problem" and "solution", text; "level" and "type" (the subject) are kept where they are there.
        split: "train" or "test".
        index: position in the split, from 0.
        location: file and row, for messages.

    Raises:
        DataError: a field is missing, or the solution has no closed box with something in it.
    """
    require_text(example, ("problem", "solution"), location)
    problem, solution = example["problem"], example["solution"]
    answer = last_boxed(solution)
    if not answer:
        raise DataError(f"{location}: the solution has no '\\boxed{{ANSWER}}': ...{solution[-80:]!r}")
    kept = {name: str(example[name]) for name in ("level", "type") if example.get(name) is not None}
    return {
        "data_source": HUB[0],
        "prompt": [{"role": "user", "content": f"{problem} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, **kept},
    }


def extract_answer(text: str) -> str | None:
    r"""The last `\boxed{...}`; else the rest of the line after the last "Answer:" or "answer is"; None: neither."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    stated = list(_STATED.finditer(text))
    return text[stated[-1].end() :].partition("\n")[0].strip().rstrip("*_.").strip() or None if stated else None


def same_value(answer: str, truth: str) -> bool:
    r"""Whether two LaTeX texts are the same, as text or else as mathematics.

    They are compared as text only, apart from spaces, \left and \cdot, where the answer has more than `MOST_CHARACTERS`
    or where the value or expansion of either would be astronomic (9^{9^9}, (x+y+z)^{99}; see latex_size.py).

    Raises:
        ValueError: the truth cannot be read as mathematics, so that no other text could be compared with it.
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
    """The text without spacing, sizes of brackets and braces around one character, and with one sign for products."""
    for written, normal in _WRITTEN:
        text = written.sub(normal, text)
    return text


def _plain(text: str) -> str:
    """The text without dollar signs, LaTeX's forced spaces and surrounding white space."""
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
