"""The built-in task: exact answers, a truly held-out validation split, the same rows everywhere."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from typing import Any

import pytest

from grpo_dist.tasks import arithmetic
from grpo_dist.tasks.gsm8k import compute_score
from tests.messages import refuses


def operands(row: dict[str, Any]) -> tuple[int, int]:
    a, b = row["prompt"][0]["content"].removesuffix("=?").split("+")
    return int(a), int(b)


@pytest.fixture(scope="module")
def splits() -> dict[str, list[dict[str, Any]]]:
    return {split: arithmetic.rows(split) for split in ("train", "validation")}


def test_rows_follow_verls_schema(splits: dict[str, list[dict[str, Any]]]) -> None:
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 8000, "validation": 200}
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


def test_no_question_comes_twice_not_even_swapped(splits: dict[str, list[dict[str, Any]]]) -> None:
    train, validation = ({tuple(sorted(operands(row))) for row in splits[split]} for split in splits)
    assert len(train) == 8000
    assert len(validation) == 200
    assert not train & validation


def test_the_swapped_question_of_a_drawn_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([(123, 456), (456, 123), (123, 456), (789, 789), (100, 200)])
    monkeypatch.setattr(arithmetic, "SIZES", {"train": 2, "validation": 1})
    monkeypatch.setattr(arithmetic, "draw_question", lambda rng: next(draws))
    assert [operands(row) for row in arithmetic.rows("train")] == [(789, 789), (100, 200)]


def test_the_rows_are_fixed(splits: dict[str, list[dict[str, Any]]]) -> None:
    """The shipped model was trained with these questions held out; other rows would leak."""
    text = json.dumps(splits, sort_keys=True)
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "98af87689990ecb2514e315afc6036aa6c016a725f2ba0cded67fc297e19b845"
    )
    assert [operands(row) for row in splits["validation"][:2]] == [(964, 494), (876, 530)]
    assert arithmetic.rows("validation") == splits["validation"]


def test_another_seed_makes_other_questions(splits: dict[str, list[dict[str, Any]]]) -> None:
    other = {operands(row) for row in arithmetic.rows("validation", seed=1)}
    assert len(other & {operands(row) for row in splits["validation"]}) < 5


def test_carries_decide_the_direct_answer() -> None:
    """About 30 % of the questions need no carry: (0.55)^2, since a digit pair stays below 10 in 55 of 100."""
    drawn = [arithmetic.draw_question(random.Random(i)) for i in range(4000)]
    no_carry = sum(a % 10 + b % 10 < 10 and a // 10 % 10 + b // 10 % 10 < 10 for a, b in drawn)
    assert no_carry / len(drawn) == pytest.approx(0.3025, abs=0.03)


def test_the_scorer_understands_the_answer_format(splits: dict[str, list[dict[str, Any]]]) -> None:
    row = splits["train"][0]
    truth = row["reward_model"]["ground_truth"]
    assert compute_score("arithmetic", f"1+2=3 #### {truth}", truth, row["extra_info"])["score"] == 1.0
    assert compute_score("arithmetic", f"#### {int(truth) + 10}", truth, row["extra_info"])["score"] == 0.0


@pytest.mark.parametrize("split", ["test", "", "Train"])
def test_unknown_split(split: str) -> None:
    with refuses(ValueError, f"'{split}'", "train, validation"):
        arithmetic.rows(split)


def test_imports_nothing_heavy() -> None:
    program = (
        "import sys, importlib.util as u;"
        f"s = u.spec_from_file_location('arithmetic', {arithmetic.__file__!r});"
        "m = u.module_from_spec(s); s.loader.exec_module(m); m.rows('train');"
        "print(sorted({'torch', 'transformers', 'numpy', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
