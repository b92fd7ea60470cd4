"""How a trained model is meant to be asked: what its run put around prompts, and how it sampled in validation.

A run writes this beside the model that it exports, so that whoever uses the folder asks as the run did.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_dist.errors import DataError

FILE = "grpo_dist.json"


@dataclass(frozen=True)
class Usage:
    """How to ask a model.

    Attributes:
        step: the training step after which the model was written; None: not known.
        system_prompt: comes first, where a prompt has no system message of its own.
        apply_chat_template_kwargs: variables of the chat template.
        sampling: temperature, top_p, top_k, max_tokens and stop, as `SamplingSettings` has them.
    """

    step: int | None = None
    system_prompt: str | None = None
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it into an exported model; nothing if the folder is on another machine."""
        if folder.is_dir():
            temporary = folder / f"{FILE}.tmp"
            temporary.write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n")
            temporary.replace(folder / FILE)


def read_usage(folder: Path) -> Usage:
    """What a model folder says; the defaults if it says nothing.

    Raises:
        DataError: its file is not one that a run writes.
    """
    file = folder / FILE
    if not file.is_file():
        return Usage()
    try:
        return Usage(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: not as a run writes it: {error}; mend it, or remove it") from None
