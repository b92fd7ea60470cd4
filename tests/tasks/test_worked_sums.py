from __future__ import annotations

import pytest

from grpo_dist.tasks import arithmetic
from grpo_dist.tasks.worked_sums import compute_score

SPLITS = ("train", "validation")


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


@pytest.mark.parametrize("split", SPLITS)
def test_the_labels_of_the_built_in_answers_are_the_scorers(split: str) -> None:
    """Half of the answers have a mistake; a forgotten carry leaves a true equation with a wrong digit."""
    plain, judged, whole = (getattr(arithmetic, name)(split) for name in ("rows", "steps", "outcomes"))
    kinds = set()
    for row, steps, outcome in zip(plain, judged, whole, strict=True):
        text = " ".join(steps["completions"])
        found = compute_score("arithmetic", text, row["reward_model"]["ground_truth"], {})
        assert found["step_scores"] == [float(label) for label in steps["labels"]]
        assert steps["prompt"] == outcome["prompt"] == row["prompt"]
        assert outcome == {"prompt": row["prompt"], "completions": [text], "labels": [found["score"] == 1]}
        kinds |= {i for i, label in enumerate(steps["labels"]) if not label}
    assert kinds == {0, 1, 2, 4}
    assert sum(each["labels"][0] for each in whole) / len(whole) == pytest.approx(0.5, abs=0.1)
    assert arithmetic.steps(split) == judged
