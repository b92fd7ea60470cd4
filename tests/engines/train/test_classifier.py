"""A new head on a causal LM: the same numbers on any ranks, and what is missing besides it is still missing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from grpo_dist.engines.settings import LoraSettings, ModelSettings
from grpo_dist.engines.train import model_loading
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.value_forward import with_score_token
from grpo_dist.errors import ConfigError, DataError
from tests.engines.train.test_value_forward import KEY
from tests.messages import says
from tests.models import random_batch, random_classifier, random_model
from tests.ranks import run_ranks

SEED, HIDDEN = 7, 32


def settings(path: str, **changes: Any) -> ModelSettings:
    made = ModelSettings(path, False, "fp32", "fp32", False, True, num_labels=1, key=KEY, new_head_seed=SEED)
    return replace(made, **changes)


def load(rank: int, model: ModelSettings, whole: bool = False) -> dict[str, Any]:
    """Scores and head of a model; with `whole` it is loaded by rank 0 and handed out."""
    if whole:
        model_loading._why_whole = lambda *_: "so that it is"
    torch.manual_seed(100 + rank)  # has no say
    engine = FSDPEngine(model, device="cpu", temperature=1.0)
    values = engine.compute_columns(with_score_token(random_batch(2, 2)), ("values",), micro_batch_size=2)["values"]
    head = dict(engine.full_parameters("float32"))["score.weight"]
    return {"scores": [row[-1].item() for row in values.rows()], "head": head.tolist()}


def plain_scores(path: str, head: torch.Tensor) -> list[float]:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=1).eval()
    model.score.weight.data.copy_(head)
    data = random_batch(2, 2)
    rows = zip(data["prompts"].rows(), data["responses"].rows(), strict=True)
    with torch.no_grad():
        return [model(input_ids=torch.cat(row).long()[None]).logits.item() for row in rows]


@pytest.mark.parametrize(("family", "tied"), [("Qwen3", True), ("Llama", False), ("Gemma3Text", True)])
def test_a_new_head_on_a_causal_model(tmp_path: Path, family: str, tied: bool) -> None:
    """Normal with standard deviation 1 / sqrt(hidden + 1), from the seed alone. Untied files have an output layer."""
    path = random_model(family, tmp_path, tie_word_embeddings=tied)
    assert any("lm_head" in name for name in load_file(tmp_path / "model.safetensors")) != tied
    head = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(SEED)) / math.sqrt(HIDDEN + 1)
    expected = plain_scores(path, head)
    assert max(expected) - min(expected) > 0.1, "they differ"
    for ranks, whole in ((1, False), (2, False), (2, True)):
        for found in run_ranks(ranks, load, settings(path), whole):
            assert found["head"] == head.tolist()
            assert found["scores"] == pytest.approx(expected, abs=2e-5)
    (other,) = run_ranks(1, load, settings(path, new_head_seed=SEED + 1))
    assert other["head"] != head.tolist()


def test_a_critics_new_head_is_small(tmp_path: Path) -> None:
    """Its standard deviation is 1 / (hidden + 1)."""
    (found,) = run_ranks(1, load, settings(random_model("Llama", tmp_path), small_new_head=True))
    head = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(SEED)) / (HIDDEN + 1)
    assert found["head"] == head.tolist()


def test_a_head_in_the_files_is_kept(tmp_path: Path) -> None:
    path = random_classifier(tmp_path)
    (found,) = run_ranks(1, load, settings(path))
    assert found["head"] == load_file(tmp_path / "model.safetensors")["score.weight"].tolist()


def refused(rank: int, model: ModelSettings) -> str:
    try:
        FSDPEngine(model, device="cpu", temperature=1.0)
    except (ConfigError, DataError) as error:
        return str(error)
    return ""


def test_what_a_new_head_does_not_mend(tmp_path: Path) -> None:
    path = random_model("Llama", tmp_path, tie_word_embeddings=False)
    says(run_ranks(1, refused, settings(path, new_head_seed=None))[0], f"{KEY}={path}", "score.weight")
    says(run_ranks(1, refused, settings(path, lora=LoraSettings(4, 8.0, "all-linear")))[0], KEY, "lora_rank=4")
    tensors = load_file(tmp_path / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    says(run_ranks(1, refused, settings(path))[0], f"{KEY}={path}", "model.norm.weight")
    save_file(tensors | {"model.norm.weight": norm, "extra.weight": norm.clone()}, tmp_path / "model.safetensors")
    says(run_ranks(1, refused, settings(path))[0], f"{KEY}={path}", "extra.weight")
