"""A response without an answer does not vote in maj@n, whatever the scorer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from grpo_dist.algorithms.validation import majority_at_n, pred_ids
from grpo_dist.rewards import load_reward_function
from tests.rewards.scoring import scored

EXAMPLES = Path(__file__).parents[2] / "examples"
MULTIPLE_CHOICE, PLANNER = (str(EXAMPLES / name) for name in ("rewards/multiple_choice.py", "planner/planner.py"))
PLAN = [{"agent": "search", "task": "find it"}]


@pytest.mark.parametrize(
    ("path", "data_source", "truth", "answer"),
    [
        (None, "lighteval/MATH", "7", r"so \boxed{7}"),
        (None, "math_dapo", "7", "Answer: 7"),
        (None, "aime2025", "7", r"\boxed{7}"),
        (None, "openai/gsm8k", "7", "#### 7"),
        (None, "arithmetic", "7", "#### 7"),
        ("grpo_dist.tasks.worked_sums", "arithmetic", "7", "#### 7"),
        (MULTIPLE_CHOICE, "letters", "B", "Answer: B"),
        (None, "countdown", {"target": 7, "numbers": [3, 4]}, "<answer>3+4</answer>"),
        (PLANNER, "planner", PLAN, str(PLAN).replace("'", '"')),
        ("grpo_dist.rewards.exact_match", "texts", "7", "7"),
    ],
)
def test_only_answers_vote(path: str | None, data_source: str, truth: object, answer: str) -> None:
    """Three responses are cut off before the answer, two are right."""
    function = load_reward_function(path, "compute_score", {})
    texts = ["I am thinking ..."] * 3 + [answer] * 2
    results = [scored(text, truth, data_source, function=function) for text in texts]
    assert [result.extra["acc"] for result in results] == [0.0] * 3 + [1.0] * 2
    assert [result.pred for result in results[:3]] == [None] * 3
    if results[-1].pred is not None:  # countdown, plans and exact texts are no answers to vote on
        scores = [[result.extra["acc"] for result in results]]
        votes = pred_ids([result.pred for result in results])
        assert majority_at_n(np.array(scores), votes[None]).tolist() == [1.0]
