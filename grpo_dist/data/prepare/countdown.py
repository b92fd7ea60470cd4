"""Countdown, generated: reach a target with the given numbers, each used once. After TinyZero's task.

Every problem has a solution, because its target is the value of a random expression of its numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from grpo_dist.data.prepare.files import Row, write_splits
from grpo_dist.errors import DataError

NUMBERS = range(1, 100)  # what may be given
TARGETS = range(10, 101)
TRIES_PER_PROBLEM = 200

Problem = tuple[tuple[int, ...], int]  # numbers as they are shown, target


def draw_problem(rng: random.Random, count: int) -> Problem | None:
    """`count` random numbers and the value of a random expression of them; None: it is no target.

    The expression joins two of the values at random until one is left; each value on the way is a whole number of at
    least 1, so the problem can be solved with such steps.
    """
    numbers = tuple(rng.choice(NUMBERS) for _ in range(count))
    values = list(numbers)
    while len(values) > 1:
        rng.shuffle(values)
        a, b = values.pop(), values.pop()
        results = [a + b, a * b, *([a - b] if a > b else []), *([a // b] if a % b == 0 else [])]
        values.append(rng.choice(results))
    return (numbers, values[0]) if values[0] in TARGETS else None


def draw_problems(count: int, num_numbers: Sequence[int], seed: int) -> list[Problem]:
    """Different problems; two with the same numbers in another order, and the same target, are not different.

    Raises:
        DataError: there are not so many.
    """
    rng = random.Random(seed)
    found: dict[Problem, Problem] = {}
    for _ in range(TRIES_PER_PROBLEM * count):
        if len(found) == count:
            break
        problem = draw_problem(rng, rng.choice(num_numbers))
        if problem is not None:
            found.setdefault((tuple(sorted(problem[0])), problem[1]), problem)
    if len(found) < count:
        raise DataError(
            f"--train_size and --test_size ask for {count:,} different problems of {list(num_numbers)} numbers; "
            f"only {len(found):,} were found"
        )
    return list(found.values())


def countdown_row(problem: Problem, *, split: str, index: int) -> Row:
    """One problem in verl's schema; the ground truth is {"target": int, "numbers": [int, ...]}."""
    numbers, target = problem
    content = (
        f"Using the numbers {', '.join(map(str, numbers))}, write an expression that equals {target}. Use each number "
        "exactly once, with +, -, *, / and parentheses. Think first, then give the expression, and nothing else, in "
        "<answer> </answer> tags, for example <answer>(1 + 2) / 3</answer>."
    )
    return {
        "data_source": "countdown",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"target": target, "numbers": list(numbers)}},
        "extra_info": {"split": split, "index": index},
    }


def prepare_countdown(
    local_save_dir: str, *, train_size: int, test_size: int, num_numbers: Sequence[int], seed: int
) -> dict[str, int]:
    """Write train.parquet and test.parquet; no problem stands in both.

    Args:
        local_save_dir: where to; made if it is not there.
        train_size: problems in train.parquet, at least 1.
        test_size: problems in test.parquet, at least 1.
        num_numbers: how many numbers a problem may give, such as [3, 4]; each at least 2.
        seed: the same seed makes the same files, everywhere.

    Returns:
        Rows by file written.

    Raises:
        DataError: a size is too small, or there are not so many different problems.
    """
    for key, values, least in (
        ("train_size", [train_size], 1),
        ("test_size", [test_size], 1),
        ("num_numbers", num_numbers, 2),
    ):
        if min(values) < least or max(values) > 10**7:
            raise DataError(f"--{key}={', '.join(map(str, values))}: must be at least {least}")
    if max(num_numbers) > 10:
        raise DataError(f"--num_numbers={max(num_numbers)}: at most 10")
    problems = draw_problems(train_size + test_size, num_numbers, seed)
    splits = {"test": problems[:test_size], "train": problems[test_size:]}
    rows = {
        split: [countdown_row(problem, split=split, index=i) for i, problem in enumerate(splits[split])]
        for split in ("train", "test")
    }
    return write_splits(rows, local_save_dir)
