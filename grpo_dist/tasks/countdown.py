"""The numbers game Countdown: reach the target with the given numbers, each used exactly once.

The rows, generated, and the scorer (docs/rewards.md#the-scorers): the task and the scale of TinyZero
(https://github.com/Jiayi-Pan/TinyZero). Every problem has a solution, because its target is the value of a random
expression of its numbers. The scorer computes with exact fractions, not floats, and executes no code of the response.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any

from grpo_dist.data.conversion import Row, Written, check_sizes, verl_row, write_splits
from grpo_dist.errors import DataError
from grpo_dist.rewards.format import MINUS_SIGNS, last_tag_content

NUMBERS = range(1, 100)  # what may be given
TARGETS = range(10, 101)
TRIES_PER_PROBLEM = 200
MOST_CHARACTERS = 300  # of an expression: bounds the time, the depth and the size of its value
_SIGNS = MINUS_SIGNS | str.maketrans({"×": "*", "·": "*", "÷": "/"})  # as people write them
_EXPRESSION = re.compile(r"[0-9+\-*/()\s]+")
_EQUALS = re.compile(r"=\s*-?[0-9.,]+\s*$")
_OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

Problem = tuple[tuple[int, ...], int]  # numbers as they are shown, target


def draw_problem(rng: random.Random, count: int) -> Problem | None:
    """`count` random numbers and the value of a random expression of them; None if the value is not in `TARGETS`.

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
    """Draw different problems, or raise a DataError; those with one target and the same numbers count as equal."""
    rng = random.Random(seed)
    problems: dict[Problem, Problem] = {}
    for _ in range(TRIES_PER_PROBLEM * count):
        if len(problems) == count:
            break
        problem = draw_problem(rng, rng.choice(num_numbers))
        if problem is not None:
            problems.setdefault((tuple(sorted(problem[0])), problem[1]), problem)
    if len(problems) < count:
        raise DataError(
            f"--train_size and --test_size ask for {count:,} different problems of {list(num_numbers)} numbers; "
            f"only {len(problems):,} were found"
        )
    return list(problems.values())


def make_row(problem: Problem, *, split: str, index: int) -> Row:
    """One problem in verl's schema; the ground truth is {"target": int, "numbers": [int, ...]}."""
    numbers, target = problem
    content = (
        f"Using the numbers {', '.join(map(str, numbers))}, write an expression that equals {target}. Use each number "
        "exactly once, with +, -, *, / and parentheses. Think first, then give the expression, and nothing else, in "
        "<answer> </answer> tags, for example <answer>(1 + 2) / 3</answer>."
    )
    return verl_row("countdown", content, {"target": target, "numbers": list(numbers)}, split=split, index=index)


def prepare(local_save_dir: str, *, train_size: int, test_size: int, num_numbers: Sequence[int], seed: int) -> Written:
    """Write train.parquet and test.parquet; no problem stands in both.

    Args:
        num_numbers: how many numbers a problem may give, such as [3, 4]; each at least 2.
        seed: the same seed makes the same files, everywhere.

    Raises:
        DataError: a size is too small, or there are not so many different problems.
    """
    check_sizes(train_size=train_size, test_size=test_size)
    if min(num_numbers) < 2 or max(num_numbers) > 10:
        raise DataError(f"--num_numbers={', '.join(map(str, num_numbers))}: must be at least 2 and at most 10")
    problems = draw_problems(train_size + test_size, num_numbers, seed)
    rows = {
        split: [make_row(problem, split=split, index=i) for i, problem in enumerate(drawn)]
        for split, drawn in (("train", problems[test_size:]), ("test", problems[:test_size]))
    }
    return write_splits(rows, local_save_dir)


def parse_expression(text: str) -> ast.expr | None:
    """Read an expression of whole numbers, + - * / and parentheses; None if the text is something else.

    A final `= NUMBER` is ignored. Powers, floor division, names, calls and other bases are something else.
    """
    text = _EQUALS.sub("", text.translate(_SIGNS)).strip()
    if len(text) > MOST_CHARACTERS or not _EXPRESSION.fullmatch(text):
        return None
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError, RecursionError):
        return None
    return tree if all(_is_arithmetic(node) for node in ast.walk(tree)) else None


def evaluate(node: ast.expr) -> Fraction:
    """The exact value of an expression from `parse_expression`; a ZeroDivisionError if it divides by zero."""
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](evaluate(node.left), evaluate(node.right))
    if isinstance(node, ast.UnaryOp):
        value = evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    return Fraction(node.value)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    format_score: float = 0.1,
    tag: str = "answer",
) -> dict[str, float]:
    """Score the expression in the last `<answer>...</answer>`.

    Args:
        ground_truth: {"target": int, "numbers": [int, ...]}.
        format_score: for an expression that is no solution.
        tag: the tag that holds the expression.

    Returns:
        score; and, 0 or 1: `format`, an expression in the tag; `numbers`, each used once; `acc`, a solution.

    Raises:
        ValueError: the ground truth has another form.
    """
    target, numbers = _checked_truth(ground_truth)
    tree = parse_expression(last_tag_content(solution_str, tag) or "")
    if tree is None:
        return {"score": 0.0, "format": 0.0, "numbers": 0.0, "acc": 0.0}
    used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    complete, correct = sorted(used) == sorted(numbers), False  # type: ignore[type-var]
    with suppress(ZeroDivisionError):
        correct = complete and evaluate(tree) == target
    score = 1.0 if correct else format_score
    return {"score": score, "format": 1.0, "numbers": float(complete), "acc": float(correct)}


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    return isinstance(node, (ast.BinOp, ast.UnaryOp, ast.UAdd, ast.USub, *_OPERATIONS))


def _checked_truth(truth: Any) -> tuple[int, list[int]]:
    match truth:
        case {"target": target, "numbers": [_, *_] as numbers} if {*map(type, (target, *numbers))} == {int}:
            return target, list(numbers)
    raise ValueError(f'ground_truth {truth!r} must be {{"target": integer, "numbers": [integers]}}')
