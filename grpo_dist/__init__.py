"""GRPO for language models, distributed: `train` is the call from Python, `python -m grpo_dist.main` the command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_dist.api import TrainingResult, train

__version__ = "0.1.0"
__all__ = ["TrainingResult", "__version__", "train"]


def __getattr__(name: str) -> Any:
    """Import what is public when it is asked for: commands that need none of it start sooner."""
    if name in {"TrainingResult", "train"}:
        from grpo_dist import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
