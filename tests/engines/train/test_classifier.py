"""Linear heads: new ones are the same on any ranks; values are those of transformers' classifiers in every layout."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from grpo_dist.engines.settings import ModelSettings, PassLimits
from grpo_dist.engines.train import model_loading
from grpo_dist.engines.train.forward import ValueForward
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.micro_batch import MicroBatch
from grpo_dist.protocol import DataProto
from grpo_dist.protocol.sequences import with_score_token
from tests.engines.train.plain import built, told
from tests.messages import says
from tests.models import random_batch, random_classifier, random_model
from tests.ranks import run_ranks
from tests.worker_settings import lora, model_settings

SEED, HIDDEN = 7, 32
KEY = "reward_model.model.path"


def settings(path: str, **changes: Any) -> ModelSettings:
    return model_settings(path, **({"num_labels": 1, "key": KEY, "new_head_seed": SEED} | changes))


def load(rank: int, model: ModelSettings, whole: bool = False) -> dict[str, Any]:
    """Scores and head of a model; with `whole` it is loaded by rank 0 and handed out."""
    if whole:
        model_loading._why_whole = lambda *_: "so that it is"
    torch.manual_seed(100 + rank)  # has no say
    engine = FSDPEngine(model, device="cpu", temperature=1.0)
    values = engine.compute_columns(with_score_token(random_batch(2, 2)), ("values",), PassLimits("", 2))["values"]
    head = dict(engine.full_parameters("float32"))["score.weight"]
    return {"scores": [row[-1].item() for row in values.rows()], "head": head.tolist()}


@pytest.mark.deep
@pytest.mark.parametrize(("family", "tied"), [("Qwen3", True), ("Llama", False), ("Gemma3Text", True)])
def test_a_new_head_on_a_causal_model(tmp_path: Path, family: str, tied: bool) -> None:
    """Normal with standard deviation 1 / sqrt(hidden + 1), from the seed alone. Untied files have an output layer."""
    path = random_model(family, tmp_path, tie_word_embeddings=tied)
    assert any("lm_head" in name for name in load_file(tmp_path / "model.safetensors")) != tied
    head = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(SEED)) / math.sqrt(HIDDEN + 1)
    expected = [score.item() for score in plain(path, "Sequence", random_batch(2, 2), head)]
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


def refused(rank: int, *models: ModelSettings) -> list[str]:
    return [told(FSDPEngine, model, device="cpu", temperature=1.0) for model in models]


def test_what_a_new_head_does_not_mend(tmp_path: Path) -> None:
    path = Path(random_model("Llama", tmp_path / "policy", tie_word_embeddings=False))
    tensors = load_file(path / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    short, more = (str(shutil.copytree(path, tmp_path / name)) for name in ("short", "more"))
    save_file(tensors, Path(short, "model.safetensors"), {"format": "pt"})
    extra = tensors | {"model.norm.weight": norm, "extra.weight": norm.clone()}
    save_file(extra, Path(more, "model.safetensors"), {"format": "pt"})
    two = random_classifier(tmp_path / "two", "Qwen3", num_labels=2)
    cases: list[tuple[ModelSettings, list[str]]] = [
        (settings(str(path), new_head_seed=None), [f"{KEY}={path}", "score.weight"]),
        (settings(str(path), lora=lora()), [KEY, "lora_rank=4"]),
        (settings(short), [f"{KEY}={short}", "model.norm.weight"]),
        (settings(more), [f"{KEY}={more}", "extra.weight"]),
        (settings(two, new_head_seed=None), [f"{KEY}={two}", "score.weight has 2 outputs"]),
    ]
    (messages,) = run_ranks(1, refused, *(model for model, _ in cases))
    for message, (_, parts) in zip(messages, cases, strict=True):
        says(message, *parts)


FAMILIES = ("Qwen3", "Llama", "Gemma2", "Olmo2", "Qwen3Moe")


def values(rank: int, path: str, layout: str, num_labels: int, data: DataProto) -> tuple[list, str]:
    """Of this rank's half of the rows, or of all on a single rank."""
    engine = built(path, layout=layout, num_labels=num_labels)
    size = torch.distributed.get_world_size()
    own = np.array_split(np.arange(len(data)), size)[rank]
    found = engine.compute_columns(data.index(own), ("values",), PassLimits("", 3))
    return [row.tolist() for row in found["values"].rows()], engine.forward.report


def plain(path: str, kind: str, data: DataProto, head: torch.Tensor | None = None) -> list[torch.Tensor]:
    """What transformers' own class says of each sequence alone."""
    auto = getattr(transformers, f"AutoModelFor{kind}Classification")
    changes = {} if head is None else {"num_labels": 1}
    model = auto.from_pretrained(path, dtype=torch.float32, **changes).eval()
    if head is not None:
        model.score.weight.data.copy_(head)
    rows = zip(data["prompts"].rows(), data["responses"].rows(), strict=True)
    with torch.no_grad():
        return [model(input_ids=torch.cat(row).long()[None]).logits[0] for row in rows]


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_value_is_the_score_of_a_sequence_classifier(tmp_path: Path, family: str) -> None:
    path, data = random_classifier(tmp_path, family), random_batch(num_groups=2, n=3)
    expected = [score.item() for score in plain(path, "Sequence", data)]
    assert max(expected) - min(expected) > 0.1, "they differ"
    for layout in ("padded", "packed", "shared"):
        ((found, report),) = run_ranks(1, values, path, layout, 1, with_score_token(data))
        assert [row[-1] for row in found] == pytest.approx(expected, abs=2e-5), report


def test_values_are_those_of_the_token_before_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Two outputs, bad and good, and a bias, as a token classifier is saved: the log odds of good."""
    path, data = random_classifier(tmp_path, "Qwen3", "Token", num_labels=2), random_batch(num_groups=3, n=2)
    starts = data["prompts"].lengths.tolist()
    logits = plain(path, "Token", data)
    expected = [(of_row[:, 1] - of_row[:, 0])[k - 1 : -1] for k, of_row in zip(starts, logits, strict=True)]
    for ranks in (1, 2):
        found = [row for rows, _ in run_ranks(ranks, values, path, "shared", 2, data) for row in rows]
        for row, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(row), wanted, atol=2e-5, rtol=0)


def shuffled(rank: int, path: str) -> str:
    """What the check says of a head of zeros and a packed layout in which every token is another one."""
    run = ValueForward._run

    def run_on_others(self: ValueForward, micro_batch: MicroBatch, **options: Any) -> Any:
        if micro_batch.segments is not None:
            micro_batch = replace(micro_batch, input_ids=micro_batch.input_ids.roll(1))
        return run(self, micro_batch, **options)

    ValueForward._run = run_on_others  # type: ignore[method-assign]
    engine = built(path, layout="packed", num_labels=1)
    torch.nn.init.zeros_(engine.model.score.weight)
    values = engine.compute_columns(random_batch(2, 2), ("values",), PassLimits("", 4))["values"]
    assert not values.values.any()
    return engine.forward.report


@pytest.mark.deep
def test_a_head_of_zeros_does_not_hide_a_wrong_layout(tmp_path: Path) -> None:
    (report,) = run_ranks(1, shuffled, random_classifier(tmp_path))
    assert report.startswith("padded")
    says(report, "instead", "packed", "values")
