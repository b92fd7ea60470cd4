"""The built-in task: exact answers, a truly held-out validation split, the same rows everywhere; and its scorer."""

import hashlib
import json
from typing import Any

import pytest

from grpo_dist.tasks import arithmetic
from grpo_dist.tasks.worked_sums import compute_score
from tests.tiers import first


def operands(row: dict[str, Any]) -> tuple[int, int]:
    a, b = row["prompt"][0]["content"].removesuffix("=?").split("+")
    return int(a), int(b)


def test_rows_follow_verls_schema_and_no_question_comes_twice_not_even_swapped() -> None:
    splits = {split: arithmetic.rows(split) for split in ("train", "validation")}
    questions = set()
    for split, rows in splits.items():
        for index, row in enumerate(rows):
            a, b = operands(row)
            assert row == {
                "data_source": "arithmetic",
                "prompt": [{"role": "user", "content": f"{a}+{b}=?"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"split": split, "index": index},
            }
            assert 100 <= a <= 999
            assert 100 <= b <= 999
            questions.add(tuple(sorted((a, b))))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 8000, "validation": 200}
    assert len(questions) == 8200
    # The shipped model was trained with these questions held out; other rows would leak.
    rows_as_json = json.dumps(splits, sort_keys=True).encode()
    known = "98af87689990ecb2514e315afc6036aa6c016a725f2ba0cded67fc297e19b845"
    assert hashlib.sha256(rows_as_json).hexdigest() == known
    other = {operands(row) for row in arithmetic.rows("validation", seed=1)}
    assert len(other & {operands(row) for row in splits["validation"]}) < 5


def test_steps_are_judged_by_the_digits_of_the_sum() -> None:
    for answer, score, steps in (
        (arithmetic.worked_answer(289, 456), 1, [1, 1, 1, 1, 1]),  # 9+6=15 8+5+1=14 2+4+1=7 #### 745
        ("9+6=15 8+5=13 2+4+1=7 #### 735", 0, [1, 0, 1, 1, 0]),  # a carry is forgotten
        ("9+6=14 8+5+1=14 2+4+1=7 #### 745", 1, [0, 1, 1, 1, 1]),
        ("#### 745", 1, [1, 1]),
        ("745  #### x=", 0, [0, 1, 0]),
        ("", 0, []),
    ):
        found = compute_score("arithmetic", answer, "745", {})
        assert (found["score"], found["step_scores"]) == (score, steps)


@pytest.mark.parametrize("split", first(["train", "validation"], "validation"))
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
