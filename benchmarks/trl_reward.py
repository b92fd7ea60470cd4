"""The rewards of both sides of against_trl.py, in TRL's form, on the standard library alone."""

from __future__ import annotations

import re
from typing import Any


def distinct(completions: list[Any], **columns: Any) -> list[float]:
    """The share of distinct characters: cheap, and different for every response."""
    texts = [completion[0]["content"] for completion in completions]
    return [len(set(text)) / max(len(text), 1) for text in texts]


def right_sum(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where the last `#### NUMBER` is the answer: what the built-in task's own reward says."""
    found = [re.findall(r"#### (-?[0-9]+)", completion[0]["content"]) for completion in completions]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]
