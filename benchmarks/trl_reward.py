"""The reward of both sides of against_trl.py, in TRL's form: cheap, and different for every response."""

from __future__ import annotations

from typing import Any


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """The share of distinct characters."""
    texts = [completion[0]["content"] for completion in completions]
    return [len(set(text)) / max(len(text), 1) for text in texts]
