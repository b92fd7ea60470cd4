"""Reward for responses in tags: `<think>...</think><answer>...</answer>`.

    custom_reward_function.path=grpo_dist.rewards.format
    custom_reward_function.reward_kwargs='{tags: [think, answer], format_score: 0.1}'

The rule-based reward of DeepSeek-R1-Zero (https://arxiv.org/abs/2501.12948, section 2.2.2), combined as the scorers of
TinyZero and verl do: nothing outside the format, a little for the format, 1 for the right answer in it.

Scorers of tasks take from here how numbers stand in texts: their minus signs, and where they begin and end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

# Hyphens, figure dash, en dash and the minus signs of Unicode: models write all of them for a minus.
MINUS_SIGNS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-")


def contains(text: str, part: str) -> bool:
    """Return whether a part stands in a text as whole words and whole numbers.

    5 stands in "-5", "5%", "2+3=5" and "3, 5", not in 2.5, 1/5, 10:5, 2^5 and 15; 1 not in 1,000, 200 not in 1,200.
    """
    before, after = r"(?<!\w)", r"(?!\w)"
    if part[:1].isdecimal():
        before += r"(?<!\d[./⁄:^])" + (r"(?<!\d,)" if re.match(r"\d{3}(?!\d)", part) else "")
    if part[-1:].isdecimal():
        after += r"(?![./⁄:^]\d|,\d{3}(?!\d))"
    return re.search(before + re.escape(part) + after, text) is not None


def accepted_answers(ground_truth: Any) -> list[str]:
    """Return the texts of a ground truth: a text or a number, or each one of a list, which are alternatives.

    Raises:
        ValueError: it, or one of the list, is something else (an object, null, nan), or blank text.
    """
    accepted = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not accepted or not all(_is_answer(answer) for answer in accepted):
        raise ValueError(
            f"ground_truth {ground_truth!r} holds no answer; it must be a text, a number, or a list of these"
        )
    return [str(answer).strip() for answer in accepted]


def _is_answer(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, int) or (isinstance(value, Real | Decimal) and math.isfinite(value))


def check_tags(tags: Sequence[str], opened: str | None = None) -> None:
    """Check the `tags` of a reward function, and the one that the prompt has opened."""
    if isinstance(tags, str) or not tags or len(set(tags)) != len(tags):
        raise ValueError(f"reward_kwargs.tags={tags!r}: must be a list of different tag names")
    if opened not in (None, tags[0]):
        raise ValueError(f"reward_kwargs.opened={opened!r}: must be {tags[0]!r}, the first of tags, or null")


def tag_contents(text: str, tags: Sequence[str]) -> list[str] | None:
    """Return what stands in the tags, stripped; None unless the text is these tags, once each, in this order.

    Only white space may stand around the tags, and none may be empty. Linear in the text: a lazy regular
    expression takes minutes on a response that repeats a tag.
    """
    contents, rest = [], text.strip()
    for tag in tags:
        start, end = f"<{tag}>", f"</{tag}>"
        if text.count(start) != 1 or text.count(end) != 1 or not rest.startswith(start):
            return None
        content, end_tag, rest = rest.removeprefix(start).partition(end)
        if not end_tag or not content.strip():
            return None
        contents.append(content.strip())
        rest = rest.lstrip()
    return None if rest else contents


def last_tag_content(text: str, tag: str) -> str | None:
    """Return what stands in the last complete `<tag>...</tag>`, stripped; None if there is none."""
    before, closing, _ = text.rpartition(f"</{tag}>")
    content = before.rpartition(f"<{tag}>")
    return content[2].strip() if closing and content[1] else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    tags: Sequence[str] = ("think", "answer"),
    format_score: float = 0.1,
    opened: str | None = None,
) -> dict[str, float]:
    """Score the format, and the answer in the last tag.

    Args:
        ground_truth: the answer, or a list of accepted ones; compared as text, without surrounding white space.
        tags: names of the tags, in order; the last one holds the answer.
        format_score: for the right format with a wrong answer; 1: the answer does not matter.
        opened: the first tag, where the chat template ends the prompt with `<think>`: responses go on behind it.

    Returns:
        score: 1 for the right answer in the right format, `format_score` for that alone, else 0; `format` and `acc`.

    Raises:
        ValueError: the tags are no list of names with `opened` first; or the answer matters, and the ground truth is no
            text or number.
    """
    check_tags(tags, opened)
    contents = tag_contents(solution_str if opened is None else f"<{opened}>{solution_str}", tags)
    accepted = [str(ground_truth).strip()] if format_score == 1 else accepted_answers(ground_truth)
    correct = contents is not None and contents[-1] in accepted
    score = 1.0 if correct else format_score if contents is not None else 0.0
    return {"score": score, "format": float(contents is not None), "acc": float(correct)}
