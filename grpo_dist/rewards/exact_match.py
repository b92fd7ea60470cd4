"""Reward for the same text: the answer equals, or contains, one of the accepted answers.

    custom_reward_function.path=grpo_dist.rewards.exact_match
    custom_reward_function.reward_kwargs='{mode: contains, tag: answer, ignore_articles: true}'

With `ignore_articles` the normalisation is the one of SQuAD's exact match (https://arxiv.org/abs/1606.05250), except
that points and signs of numbers stay: 3.14 is not 314. Before a number all kinds of minus signs are one.
"""

from __future__ import annotations

import re
import unicodedata
from functools import partial
from typing import Any

from grpo_dist.rewards.contract import check_choice
from grpo_dist.rewards.format import MINUS_SIGNS, accepted_answers, contains, last_tag_content

MODES = ("exact", "contains")
_MINUS = re.compile(rf"[{''.join(map(chr, MINUS_SIGNS))}](?=[$€£¥(]?\.?\d)")
# Any sign but those between digits and the minus or point that begins a number.
_PUNCTUATION = re.compile(r"(?!(?<=\d)[^\w\s](?=\d)|(?<!\w)(?:-(?=[$€£¥(]?\.?\d)|\.(?=\d)))(?:[^\w\s]|_)")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)


def normalize(
    text: str, *, ignore_case: bool = True, ignore_punctuation: bool = True, ignore_articles: bool = False
) -> str:
    """Return the text as it is compared: composed Unicode (NFKC), single spaces, and without what is ignored."""
    text = _MINUS.sub("-", unicodedata.normalize("NFKC", text))
    if ignore_case:
        text = text.casefold()
    if ignore_punctuation:
        text = _PUNCTUATION.sub("", text)
    if ignore_articles:
        text = _ARTICLES.sub(" ", text)
    return " ".join(text.split())


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    mode: str = "exact",
    tag: str | None = None,
    ignore_case: bool = True,
    ignore_punctuation: bool = True,
    ignore_articles: bool = False,
) -> dict[str, float]:
    """Compare the answer with the accepted ones: score and acc are both 1 for one of them, else 0.

    Args:
        ground_truth: the answer, text or a number; or a list of accepted ones.
        mode: "exact": the answer is an accepted one. "contains": one stands in it as a whole: 5 in -5, not in 2.5.
        tag: the answer is in the last `<tag>...</tag>`; without one it is wrong. None: it is the whole response.
        ignore_case: whether Paris and paris are the same.
        ignore_punctuation: whether "Paris." and "Paris" are the same.
        ignore_articles: whether "the Louvre" and "Louvre" are the same.

    Raises:
        ValueError: the ground truth, or one of a list, is no text or number, or empty after normalisation, so that
            anything would contain it.
    """
    plain = partial(
        normalize, ignore_case=ignore_case, ignore_punctuation=ignore_punctuation, ignore_articles=ignore_articles
    )
    truths = [plain(truth) for truth in accepted_answers(ground_truth)]
    if not all(truths):
        raise ValueError(f"ground_truth {ground_truth!r} holds no answer: nothing is left of it once normalised")
    text = solution_str if tag is None else last_tag_content(solution_str, tag)
    answer = "" if text is None else plain(text)
    right = float(any(contains(answer, truth) if mode == "contains" else answer == truth for truth in truths))
    return {"score": right, "acc": right}


def check_reward_kwargs(*, mode: str = "exact", **others: Any) -> None:
    """Check the arguments before a run starts."""
    check_choice("mode", mode, MODES)
