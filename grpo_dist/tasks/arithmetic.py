"""The built-in task: additions of three-digit numbers, generated, with exact answers.

Small enough to learn in minutes on a laptop, and hard enough that a tiny model has to show its work: an answer
written down at once is right for some questions, an answer worked out digit by digit for nearly all.
"""

from __future__ import annotations

import random
from typing import Any

from grpo_dist.data.conversion import verl_row

# Rows by split. There are 405,450 different questions.
SIZES = {"train": 8000, "validation": 200}
SMALLEST, LARGEST = 100, 999
SEED = 0


def rows(split: str, *, seed: int = SEED) -> list[dict[str, Any]]:
    """The rows of "train" or "validation" in verl's schema; the same for the same seed, everywhere.

    No question occurs twice, neither within a split nor across splits nor with its operands swapped. Answers have
    GSM8K's form, so that the scorer of gsm8k.py scores them.
    """
    questions = _questions(seed)
    start = 0 if split == "validation" else SIZES["validation"]
    return [
        verl_row("arithmetic", question(a, b), str(a + b), split=split, index=index)
        for index, (a, b) in enumerate(questions[start : start + SIZES[split]])
    ]


def pairs(split: str, *, seed: int = SEED) -> list[dict[str, Any]]:
    """Pairs of answers to the questions of `rows`: the right sum, and another number that a sum may be."""
    rng = random.Random(f"{seed} {split}")
    pairs = []
    for row in rows(split, seed=seed):
        right = int(row["reward_model"]["ground_truth"])
        wrong = right
        while wrong == right:
            wrong = sum(draw_question(rng))
        pairs.append({"prompt": row["prompt"], "chosen": f"#### {right}", "rejected": f"#### {wrong}"})
    return pairs


def outcomes(split: str, *, seed: int = SEED) -> list[dict[str, Any]]:
    """Answers of `rows` that show the work, half of them with a mistake, each labelled by whether the sum is right."""
    return [
        {"prompt": row["prompt"], "completions": [" ".join(row["completions"])], "labels": row["labels"][-1:]}
        for row in steps(split, seed=seed)
    ]


def steps(split: str, *, seed: int = SEED) -> list[dict[str, Any]]:
    """Return the answers of `outcomes` as steps, each with a label of its own."""
    rng = random.Random(f"{seed} {split} steps")
    labelled = []
    for row in rows(split, seed=seed):
        parts = worked_answer(*_operands(row)).split(" ")
        labels = [True] * len(parts)
        if rng.random() < 0.5:
            parts, labels = _with_mistake(parts, rng)
        labelled.append({"prompt": row["prompt"], "completions": parts, "labels": labels})
    return labelled


def answers(split: str, *, seed: int = SEED) -> list[dict[str, Any]]:
    """The questions of `rows` with answers that show the work."""
    return [
        {"prompt": row["prompt"][0]["content"], "completion": worked_answer(*_operands(row))}
        for row in rows(split, seed=seed)
    ]


def worked_answer(a: int, b: int) -> str:
    """The columns from the right, each with its carry, then the answer."""
    work, carry = [], 0
    for power in range(max(len(str(a)), len(str(b)))):
        digits = [a // 10**power % 10, b // 10**power % 10] + [carry] * (carry > 0)
        work.append(f"{'+'.join(map(str, digits))}={sum(digits)}")
        carry = sum(digits) // 10
    return f"{' '.join(work)} #### {a + b}"


def _with_mistake(parts: list[str], rng: random.Random) -> tuple[list[str], list[bool]]:
    """A worked answer in which one column has a wrong last digit, or leaves out its carry; and which steps are good."""
    columns, wrong = parts[:-2], rng.randrange(len(parts) - 2)
    terms, _, result = columns[wrong].partition("=")
    value, digits = int(result), terms.split("+")
    if len(digits) == 3 and rng.random() < 0.5:
        columns[wrong] = f"{'+'.join(digits[:2])}={value - 1}"
    else:
        columns[wrong] = f"{terms}={value // 10 * 10 + (value + rng.randint(1, 9)) % 10}"
    results = [column.partition("=")[2] for column in columns]
    total = results[-1] + "".join(part[-1] for part in reversed(results[:-1]))
    return [*columns, "####", total], [i != wrong for i in range(len(columns))] + [True, False]


def _operands(row: dict[str, Any]) -> tuple[int, int]:
    a, b = row["prompt"][0]["content"].removesuffix("=?").split("+")
    return int(a), int(b)


def question(a: int, b: int) -> str:
    """The text of a question."""
    return f"{a}+{b}=?"


def draw_question(rng: random.Random) -> tuple[int, int]:
    """Two operands, each uniform over all numbers of three digits."""
    return rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)


def _questions(seed: int) -> list[tuple[int, int]]:
    """All questions of the task, validation first, none twice in either order of the operands."""
    rng = random.Random(seed)
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    while len(pairs) < sum(SIZES.values()):
        a, b = draw_question(rng)
        pairs.setdefault((min(a, b), max(a, b)), (a, b))
    return list(pairs.values())
