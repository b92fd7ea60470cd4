"""Reward for the numbers game Countdown: reach the target with the given numbers, each used exactly once.

    (built in for data_source countdown; `python -m grpo_dist.data.prepare countdown` makes the data)
    custom_reward_function.path=grpo_dist.rewards.countdown
    custom_reward_function.reward_kwargs='{format_score: 0.0, tag: answer}'

The task and the scale of TinyZero (https://github.com/Jiayi-Pan/TinyZero): 1 for a solution, 0.1 for an expression in
`<answer>` that is none. The values are exact fractions, not floats, and no code of the response is executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, TypeGuard

from grpo_dist.rewards.base import SCORERS
from grpo_dist.rewards.format import last_tag_content

MOST_CHARACTERS = 300  # of an expression: bounds the time, the depth and the size of its value
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})  # as people write them
_EXPRESSION = re.compile(r"[0-9+\-*/()\s]+")
_EQUALS = re.compile(r"=\s*-?[0-9.,]+\s*$")
_OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def parse_expression(text: str) -> ast.expr | None:
    """The expression of whole numbers, + - * / and parentheses that the text is; None: it is something else.

    A final `= NUMBER` is not looked at. Powers, floor division, names, calls and other bases are something else.
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
    """The exact value of an expression from `parse_expression`.

    Raises:
        ZeroDivisionError: it divides by zero.
    """
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](evaluate(node.left), evaluate(node.right))
    if isinstance(node, ast.UnaryOp):
        value = evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    return Fraction(node.value)


@SCORERS.register("countdown")
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
        data_source: not used.
        solution_str: the response.
        ground_truth: {"target": int, "numbers": [int, ...]}.
        extra_info: not used.
        format_score: for an expression that is no solution.
        tag: the tag that holds the expression.

    Returns:
        score; and its parts, each 0 or 1: `format`, an expression in the tag; `numbers`, each number used once; `acc`,
        a solution.

    Raises:
        ValueError: the ground truth has another form.
    """
    target, numbers = _checked_truth(ground_truth)
    tree = parse_expression(last_tag_content(solution_str, tag) or "")
    if tree is None:
        return {"score": 0.0, "format": 0.0, "numbers": 0.0, "acc": 0.0}
    complete = sorted(_constants(tree)) == sorted(numbers)
    correct = complete and _reaches(tree, target)
    return {
        "score": 1.0 if correct else format_score,
        "format": 1.0,
        "numbers": float(complete),
        "acc": float(correct),
    }


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    return isinstance(node, (ast.BinOp, ast.UnaryOp, ast.UAdd, ast.USub, *_OPERATIONS))


def _constants(tree: ast.expr) -> Iterator[int]:
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, int))


def _reaches(tree: ast.expr, target: int) -> bool:
    try:
        return evaluate(tree) == target
    except ZeroDivisionError:
        return False


def _checked_truth(truth: Any) -> tuple[int, list[int]]:
    target, numbers = (truth.get("target"), truth.get("numbers")) if isinstance(truth, Mapping) else (None, None)
    if not _is_int(target) or not isinstance(numbers, list | tuple) or not numbers or not all(map(_is_int, numbers)):
        raise ValueError(f'ground_truth {truth!r} must be {{"target": integer, "numbers": [integers]}}')
    return target, list(numbers)


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
