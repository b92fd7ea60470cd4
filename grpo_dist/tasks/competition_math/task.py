r"""MATH (https://arxiv.org/abs/2103.03874): competition mathematics, 7,500 training and 5,000 test problems.

The rows and the scorer (docs/rewards.md#the-scorers), which compares final answers as mathematics (equality.py).
Nothing but the answer counts, so that a list of guesses earns nothing. Departures from verl's scorers, which compare
normalised text: equal values count, and the whole response is searched, not the last 300 characters.
"""

from __future__ import annotations

import re
from typing import Any

from grpo_dist.data.conversion import Row, require_text, verl_row
from grpo_dist.errors import DataError
from grpo_dist.rewards.format import accepted_answers

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
# What stands in a box without braces: \boxed5, \boxed \pi.
_BARE = re.compile(r"\\[a-zA-Z]+(?:\{[^{}$]*\})*|[^\s$\\{}]+")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)  # and what is none of its own behind a backslash
_BETWEEN = re.compile(r"(?:[\s,;$&]|\\[()\[\],;: ]|\\q?quad(?![a-zA-Z])|\\text\w*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*")


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last `\boxed{...}` or `\fbox{...}`, stripped.

    Braces inside are balanced; `\{` and `\}` are text. MATH has boxes without braces (`\boxed 5`): those hold one word.

    Returns:
        The content; a list of boxes with only commas, "and" or "or" between them; None: no box, or it is not closed.
    """
    contents, begin = dict[str, None](), len(text)
    for box in reversed(list(_BOX.finditer(text))):
        braces, start = text.startswith("{", box.end()), box.end()
        bare = _BARE.match(text, start)
        end = _closing_brace(text, start) if braces else bare and bare.end()
        if end is None or (contents and not _BETWEEN.fullmatch(text, end + braces, begin)):
            break
        contents[text[start + braces : end].strip()] = None
        begin = box.start()
    return ", ".join(reversed(contents)) if contents else None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 0
    for found in _BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return None


HUB = ("DigitalLearningGmbH/MATH-lighteval", "default")  # name and configuration on the Hugging Face hub
# verl's wording, so that results can be compared with its published ones.
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
_STATED = re.compile(r"answer[*_\s]*(?::|is\b)[*_\s:]*", re.IGNORECASE)
_DISPLAY_BEGINS = re.compile(r"\\\[|\$\$|\\begin\s*\{")
_DISPLAY = re.compile(r"\\\[(.*?)\\\]|\$\$(.*?)\$\$|(\\begin\s*\{(\w+\*?)\}.*?\\end\s*\{\4\})", re.DOTALL)


def make_row(example: Row, *, split: str, index: int, location: str) -> Row:
    r"""One MATH example in verl's schema; the ground truth is what stands in the last `\boxed{...}` of the solution.

    Args:
        example: "problem" and "solution", text; "level" and "type" (the subject) are kept where they are there.
    """
    require_text(example, ("problem", "solution"), location)
    problem, solution = example["problem"], example["solution"]
    answer = last_boxed(solution)
    if not answer:
        raise DataError(f"{location}: the solution has no '\\boxed{{ANSWER}}': ...{solution[-80:]!r}")
    kept = {name: str(example[name]) for name in ("level", "type") if example.get(name) is not None}
    return verl_row(HUB[0], f"{problem} {INSTRUCTION}", answer, split=split, index=index, **kept)


def extract_answer(text: str) -> str | None:
    r"""Return the last `\boxed{...}`; else what follows the last "Answer:" or "answer is"; None: neither.

    What follows is mathematics in `\[...\]`, `$$...$$` or an environment, on as many lines as it takes, with what is
    behind it on the last one; else the rest of the line.
    """
    if (boxed := last_boxed(text)) is not None:
        return boxed
    stated = list(_STATED.finditer(text))
    rest = text[stated[-1].end() :] if stated else ""
    shown = ""
    if _DISPLAY_BEGINS.match(rest):
        display = _DISPLAY.match(rest)
        if display is None:
            return None  # cut off
        shown, rest = (display[1] or display[2] or display[3] or "").strip(), rest[display.end() :]
    return f"{shown}{rest.partition(chr(10))[0]}".strip().rstrip("*_.").strip() or None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    right: float = 1.0,
    wrong: float = 0.0,
) -> dict[str, Any]:
    """Compare the final answer with the truth: score, `acc` (0 or 1) and `pred`, the answer as text, or None.

    Args:
        ground_truth: the answer in LaTeX, or a number; or a list of accepted ones.
        wrong: the score of a wrong answer, and of none.

    Raises:
        ValueError: the ground truth, or one of a list, is no text or number, or empty.
    """
    from grpo_dist.tasks.competition_math.equality import plain, same_value  # with sympy, which takes a second

    truths = [last_boxed(truth) or truth for truth in accepted_answers(ground_truth)]
    if not all(map(plain, truths)):
        raise ValueError(f"ground_truth {ground_truth!r} holds no answer")
    answer = extract_answer(solution_str)
    correct = answer is not None and any(same_value(answer, truth) for truth in truths)
    return {"score": right if correct else wrong, "acc": float(correct), "pred": answer}


def compute_score_dapo(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """As `compute_score`, with DAPO's scale: 1 for right, -1 for wrong."""
    return compute_score(data_source, solution_str, ground_truth, extra_info, wrong=-1.0)
