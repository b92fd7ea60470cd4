"""What an exported model says of itself: which checkpoint it is of, and how its run asked it.

A run writes this into the folder of the model before the folder appears, so that there is no model without it, and
whoever uses the folder asks as the run did.
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
    """How to ask a model, and what it is the model of.

    Attributes:
        step: the training step after which the model was written; None: not known.
        system_prompt: comes first, where a prompt has no system message of its own.
        apply_chat_template_kwargs: variables of the chat template.
        sampling: temperature, top_p, top_k, max_tokens and stop, as `SamplingSettings` has them.
        checkpoint: digest of the checkpoint that has the same weights (checkpoint/manifest.py); None: there is none.
        run: digest of the config.yaml of the run that exported it at its end; None: it was exported by a command.
        dtype: of the weights: "fp32" or "bf16".
    """

    step: int | None = None
    system_prompt: str | None = None
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    run: str | None = None
    dtype: str | None = None

    def write(self, folder: Path) -> None:
        """Write it into the folder of a model."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_usage(folder: Path) -> Usage:
    """What a model folder says; the defaults if it says nothing.

    Raises:
        DataError: its file is not one that a run writes.
    """
    file = folder / FILE
    if not file.is_file():
        return Usage()
    try:
        return Usage(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: not as a run writes it: {error}; mend it, or remove it") from None
