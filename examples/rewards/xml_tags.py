"""Reward for tags, each on its own: a first step for a model that does not know the format yet.

    custom_reward_function.path=examples/rewards/xml_tags.py
    custom_reward_function.reward_kwargs='{tags: [think, answer], per_tag: 0.2}'

grpo_dist.rewards.format asks for the whole format at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_dist.rewards.format import check_tags


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    *,
    tags: Sequence[str] = ("think", "answer"),
    per_tag: float = 0.2,
    opened: str | None = None,
) -> float:
    """`per_tag` for every opening and every closing tag that stands in the response exactly once.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: not used.
        extra_info: not used.
        tags: names of the tags.
        per_tag: for each of the 2 * len(tags) tags.
        opened: the first tag, where the chat template ends the prompt with it, and so no response does.
    """
    check_tags(tags, opened)
    text = solution_str if opened is None else f"<{opened}>{solution_str}"
    wanted = [form for tag in tags for form in (f"<{tag}>", f"</{tag}>")]
    return per_tag * sum(text.count(form) == 1 for form in wanted)
