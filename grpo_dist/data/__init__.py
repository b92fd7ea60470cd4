"""Prompts: rows in verl's schema, token ids, and a resumable sampler. Knows no Ray."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_dist.assets.model_folder import load_tokenizer
    from grpo_dist.data.files import read_rows
    from grpo_dist.data.prompts import Prompt, load_prompts
    from grpo_dist.data.sampler import PromptSampler
    from grpo_dist.data.tokenize import TokenizedPrompt, tokenize_prompts

_PLACES = {
    "grpo_dist.assets.model_folder": ("load_tokenizer",),
    "grpo_dist.data.files": ("read_rows",),
    "grpo_dist.data.prompts": ("Prompt", "load_prompts"),
    "grpo_dist.data.sampler": ("PromptSampler",),
    "grpo_dist.data.tokenize": ("TokenizedPrompt", "tokenize_prompts"),
}
__all__ = [
    "Prompt",
    "PromptSampler",
    "TokenizedPrompt",
    "load_prompts",
    "load_tokenizer",
    "read_rows",
    "tokenize_prompts",
]


def __getattr__(name: str) -> Any:
    """Import what is public when it is asked for: tasks, which each scorer's process loads, need no torch."""
    for place, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(place), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
