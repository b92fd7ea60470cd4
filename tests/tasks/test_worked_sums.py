from __future__ import annotations

import pytest

from grpo_dist.tasks import arithmetic
from grpo_dist.tasks.worked_sums import compute_score


@pytest.mark.parametrize(
    ("answer", "score", "steps"),
    [
        (arithmetic.worked_answer(289, 456), 1, [1, 1, 1, 1, 1]),  # 9+6=15 8+5+1=14 2+4+1=7 #### 745
        ("9+6=15 8+5=13 2+4+1=7 #### 735", 0, [1, 0, 1, 1, 0]),  # a carry is forgotten
        ("9+6=14 8+5+1=14 2+4+1=7 #### 745", 1, [0, 1, 1, 1, 1]),
        ("#### 745", 1, [1, 1]),
        ("745  #### x=", 0, [0, 1, 0]),
        ("", 0, []),
    ],
)
def test_steps_are_judged_by_the_digits_of_the_sum(answer: str, score: int, steps: list[int]) -> None:
    found = compute_score("arithmetic", answer, "745", {})
    assert (found["score"], found["step_scores"]) == (score, steps)
