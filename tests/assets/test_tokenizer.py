"""Loading the tokenizer of a model folder. That vLLM has the same one: tests/engines/vllm/test_arguments.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from grpo_dist.assets.model_folder import load_tokenizer
from grpo_dist.errors import DataError
from tests.messages import says


def test_load_tokenizer(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    tokenizer = load_tokenizer(str(tmp_path), trust_remote_code=False)
    assert (tokenizer("a")["input_ids"], tokenizer.eos_token_id) == ([0], 1)


def test_load_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    def message(folder: Path) -> str:
        with pytest.raises(DataError) as error:
            load_tokenizer(str(folder), trust_remote_code=False)
        assert str(error.value).startswith(f"actor_rollout_ref.model.path={folder}: ")
        return str(error.value)

    says(message(tmp_path / "gone"), "no such", "folder")
    assert "no config.json" in message(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    says(message(tmp_path), "no tokenizer")  # transformers alone would return an empty one
    (tmp_path / "tokenizer.json").write_text("not json")
    says(message(tmp_path), "load", "tokenizer:")
