"""A scorer for the built-in task that also judges the steps of an answer: the labels of a process reward model."""

from __future__ import annotations

from typing import Any

from grpo_dist.tasks import gsm8k


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Score an answer that shows its work, and its steps, which spaces separate (reward.step_separator=' ').

    Returns:
        score, acc and pred, as the scorer of gsm8k.py; and `step_scores`, 1 for each good step and 0 for the others.
        The k-th step is good if it is a true equation whose result ends in the sum's k-th digit from the right; so are
        the mark "####" and the right sum behind it.
    """
    truth, steps = str(ground_truth), [step for step in solution_str.split(" ") if step.strip()]
    behind = ["", *steps]  # the step before each
    judged = [
        step == "####" or (step == truth and behind[i] == "####") or _adds_up(step, truth[::-1][i : i + 1])
        for i, step in enumerate(steps)
    ]
    whole = gsm8k.compute_score(data_source, solution_str, ground_truth, extra_info)
    return {**whole, "step_scores": [float(good) for good in judged]}


def _adds_up(step: str, digit: str) -> bool:
    """Tell if a text is a true equation, such as 7+5+1=13, whose result ends in a digit."""
    terms, _, result = step.partition("=")
    numbers = terms.split("+")
    if digit == "" or not all(number.isdecimal() for number in (*numbers, result)):
        return False
    return sum(map(int, numbers)) == int(result) and result.endswith(digit)
