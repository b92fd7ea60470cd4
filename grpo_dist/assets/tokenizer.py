"""The tokenizer of a model folder: the same one for training, engines, servers and exports.

`tokenizer.json` is read as it is. transformers' AutoTokenizer builds many tokenizers anew from the class that the files
name, with the vocabulary and the merges of `tokenizer.json` but the class's own way to cut a text, and then a text has
other tokens than those that the model was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_dist.assets import POLICY_KEY
from grpo_dist.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Without one of these transformers builds an empty tokenizer from config.json alone, without a word.
_TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "*.model", "vocab.*", "*.tiktoken")


def load_tokenizer(path: str, *, trust_remote_code: bool, key: str = POLICY_KEY) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder on this machine."""
    setting, folder = f"{key}={path}", Path(path)
    if not folder.is_dir():
        raise DataError(f"{setting}: no such folder (looked in {Path.cwd()}); give a Hugging Face model folder")
    if not (folder / "config.json").is_file():
        raise DataError(f"{setting}: not a Hugging Face model folder: it has no config.json")
    if not any(file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)):
        raise DataError(f"{setting}: no tokenizer in the folder (no tokenizer.json); save it next to the model")
    try:
        if is_read_as_it_is(folder, trust_remote_code=trust_remote_code):
            from transformers import PreTrainedTokenizerFast  # imports neither torch nor models, which takes seconds

            return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise DataError(f"{setting}: cannot load the tokenizer: {problem}") from error


def is_read_as_it_is(folder: Path, *, trust_remote_code: bool) -> bool:
    """Say if a folder's `tokenizer.json` is all there is to its tokenizer: it comes with no trusted code of its own."""
    if not (folder / "tokenizer.json").is_file():
        return False
    settings = folder / "tokenizer_config.json"
    if not trust_remote_code or not settings.is_file():
        return True
    own_code = json.loads(settings.read_text(encoding="utf-8")).get("auto_map") or ()
    return not (isinstance(own_code, list) or "AutoTokenizer" in own_code)


def continued(messages: Sequence[Mapping[str, Any]], answer: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation in which the answer goes on from the last turn of `messages`, if both are the assistant's.

    A policy's response is such an answer: where a prompt ends in a begun turn, the two are one turn.
    """
    if not (messages and answer and messages[-1]["role"] == answer[0]["role"] == "assistant"):
        return [*messages, *answer]
    turn = {**messages[-1], **answer[0], "content": messages[-1]["content"] + answer[0]["content"]}
    return [*messages[:-1], turn, *answer[1:]]
