"""A model folder of the scale's shape with random weights in bfloat16, as the hub's are.

They are as transformers draws them. With larger ones rounding would grow from layer to layer: at three times the size
bfloat16 alone moves log-probs by more than a check of layouts allows.
"""

from __future__ import annotations

import shutil
import time
from typing import Any

from benchmarks.gpu_check.work import Work


def write_model(work: Work) -> None:
    """Write it beside its place, then name it."""
    import torch
    import transformers

    started = time.perf_counter()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**work.scale.model)
    with torch.device(work.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    temporary = work.folder / "model.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    _tokenizer(config.vocab_size).save_pretrained(temporary)
    temporary.rename(work.model)
    work.found.note("parameters", model.num_parameters() / 1e6, "M")
    work.found.note("draw and write", time.perf_counter() - started, "s")


def _tokenizer(vocab_size: int) -> Any:
    """One token per word: the roles load a tokenizer, and an export copies it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<unk>": 1, "<end>": 2} | {f"w{i}": i for i in range(3, min(vocab_size, 1000))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<end>")
