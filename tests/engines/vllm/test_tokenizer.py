"""vLLM's tokenizer is the one that prompts are made with, for every class that transformers would build anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.auto import tokenization_auto

from grpo_dist.assets.tokenizer import load_tokenizer
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.arguments import engine_args, quiet_environment
from grpo_dist.engines.vllm.tokenizer import tokenizer_args

TEXT = "She had 1234 and 100 apples;  it's 16-12.\n\tÉtienne's <|end|> Ⅳ ﬁ 両"
SPECIAL = ["<|end|>", "<s>", "<unk>"]
CORPUS = ["12 123 1234 16 100 1000 she had apples it's Étienne's"] * 50
CLASSES = sorted({name for name in tokenization_auto.TOKENIZER_MAPPING_NAMES.values() if name} | {"LlamaTokenizerFast"})


def byte_level() -> Tokenizer:
    """SmolLM2's form: digits apart."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = level
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """A unigram model with a normalizer, which marks the beginning of a word."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, sentence_pieces])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param.__name__)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=request.param(), eos_token="<|end|>", bos_token="<s>", unk_token="<unk>"
    )
    made.chat_template = "{% for m in messages %}<s>{{ m.content }}<|end|>{% endfor %}"
    made.save_pretrained(path)
    return path


def called(folder: Path, model_type: str, tokenizer_class: str, **more: Any) -> EngineSettings:
    """The settings of an engine on a model of this type, whose tokenizer has this class by name."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    saved = json.loads((folder / "tokenizer_config.json").read_text())
    saved.pop("auto_map", None)
    (folder / "tokenizer_config.json").write_text(json.dumps({**saved, "tokenizer_class": tokenizer_class, **more}))
    return EngineSettings(
        str(folder), "cpu", "float32", False, 1, 96, 64, 1024, 0.8, 0.0625, True, False, 3, needs_tokenizer=True
    )


def of_vllm(arguments: Any) -> Any:
    quiet_environment("cpu")
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(arguments["tokenizer"], tokenizer_mode=arguments["tokenizer_mode"], trust_remote_code=False)


def all_names() -> Iterator[tuple[str, str]]:
    yield from (("llama", name) for name in CLASSES)
    yield from ((model_type, "GPT2Tokenizer") for model_type in ("qwen2", "phi3", "deepseek_v3", "mistral", "gemma3"))


def test_vllms_tokens_are_those_of_training(folder: Path, tmp_path: Path) -> None:
    differing = 0
    conversation = [{"role": "user", "content": TEXT}]
    for number, (model_type, name) in enumerate(all_names()):
        settings = called(folder, model_type, name)
        mine = load_tokenizer(str(folder), trust_remote_code=False)
        theirs = of_vllm(tokenizer_args(settings, str(tmp_path / str(number))))
        ids = mine(TEXT)["input_ids"]
        assert theirs(TEXT)["input_ids"] == ids, name
        assert theirs.decode(ids) == mine.decode(ids), name
        told = [each.apply_chat_template(conversation, return_dict=False) for each in (mine, theirs)]
        assert told[0] == told[1], name
        try:
            differing += transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"] != ids
        except Exception:
            differing += 1
    assert differing > 10, "without that the tokens would have been others"


def test_trusted_code_counts_only_where_the_tokenizer_has_some(folder: Path, tmp_path: Path) -> None:
    settings = replace(called(folder, "llama", "GPT2Tokenizer"), trust_remote_code=True)
    mine, trusting = (load_tokenizer(str(folder), trust_remote_code=trust) for trust in (False, True))
    assert trusting(TEXT)["input_ids"] == mine(TEXT)["input_ids"]
    assert of_vllm(tokenizer_args(settings, str(tmp_path / "a")))(TEXT)["input_ids"] == mine(TEXT)["input_ids"]
    called(folder, "llama", "GPT2Tokenizer", auto_map={"AutoTokenizer": [None, "own.Own"]})
    assert tokenizer_args(settings, str(tmp_path / "b")) == {}, "vLLM runs the code as transformers does"
    assert "tokenizer" in tokenizer_args(replace(settings, trust_remote_code=False), str(tmp_path / "c"))


def test_an_engine_without_texts_has_no_tokenizer_and_a_named_one_wins(folder: Path, tmp_path: Path) -> None:
    settings = called(folder, "llama", "GPT2Tokenizer")
    found = engine_args(settings, folder=str(tmp_path))
    assert (found.tokenizer, found.tokenizer_mode, found.skip_tokenizer_init) == (
        f"{tmp_path}/tokenizer",
        "hf",
        False,
    )
    assert engine_args(replace(settings, needs_tokenizer=False), folder="").skip_tokenizer_init
    named = replace(settings, engine_kwargs={"tokenizer": "another"})
    assert engine_args(named, folder=str(tmp_path)).tokenizer == "another"
