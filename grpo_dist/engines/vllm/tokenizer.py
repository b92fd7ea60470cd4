"""The tokenizer that vLLM works with: the one that prompts are made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_dist.assets.tokenizer import is_read_as_it_is, load_tokenizer
from grpo_dist.engines.settings import EngineSettings

# Of a model whose tokenizers AutoTokenizer does not build anew, and that says that its files need no mending.
_CONFIG = {"model_type": "llama", "transformers_version": "5.0.0"}


def tokenizer_args(settings: EngineSettings, folder: str) -> dict[str, Any]:
    """Return vLLM's arguments for its tokenizer, which `folder` then holds in a form that AutoTokenizer reads as it is.

    vLLM's processes load the tokenizer by name, and by AutoTokenizer. One that transformers or the model's own code
    makes is made in the same way by vLLM.
    """
    if not settings.needs_tokenizer:
        return {"skip_tokenizer_init": True}
    if not is_read_as_it_is(Path(settings.model_path), trust_remote_code=settings.trust_remote_code):
        return {}
    tokenizer = load_tokenizer(settings.model_path, trust_remote_code=settings.trust_remote_code)
    tokenizer.save_pretrained(folder)
    (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
    return {"tokenizer": folder, "tokenizer_mode": "hf"}  # and no form of its own for some architectures
