"""Adapters go out in peft's form and come in again: peft computes what the merged model does, and training goes on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_dist.engines.settings import LoraSettings
from grpo_dist.errors import ConfigError, DataError
from tests.engines.train.test_hf_export import with_tokenizer
from tests.engines.train.test_lora import log_probs
from tests.messages import says
from tests.models import objective, random_batch, trainable_engine
from tests.ranks import run_ranks

LORA = LoraSettings(4, 8.0, "all-linear")
ADAPTER = "lora_adapter"


def train(rank: int, path: str, folder: Path, lora: LoraSettings, steps: int) -> dict[str, Any]:
    """Train `steps` on the same rows on any number of ranks, and export."""
    torch.manual_seed(1)
    engine = trainable_engine(path, lora=lora)
    share = list(range(8))[rank :: torch.distributed.get_world_size()]
    found = {"before": log_probs(engine), "reference": log_probs(engine, reference=True)}
    for _ in range(steps):
        data = random_batch(num_groups=4, n=2).index(share)
        engine.train_mini_batch(data, micro_batch_size=2, objective=objective())
    engine.export_hf_model(folder / "huggingface", "fp32")
    return found | {"after": log_probs(engine)}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 23).reshape(2, 10)).logits


@pytest.fixture
def model(request: pytest.FixtureRequest, random_models: dict[str, str], tmp_path: Path) -> str:
    if request.param == "GPT2":  # Conv1D: transposed weights
        return with_tokenizer("GPT2", tmp_path / "source", random_models["tied"])
    return random_models[request.param]


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        ("tied", LORA),
        ("experts", replace(LORA, base_model="owner/name")),
        ("GPT2", replace(LORA, target_modules=("c_attn", "h.0.mlp.c_fc"))),  # c_fc of one layer only
    ],
    indirect=["model"],
)
def test_peft_computes_what_the_merged_model_does(model: str, lora: LoraSettings, tmp_path: Path) -> None:
    import peft
    import transformers

    run_ranks(2, train, model, tmp_path, lora, 2)
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    untrained = logits(base)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / ADAPTER)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=1e-4, atol=1e-4)
    assert (logits(adapted) - untrained).abs().max() > 1e-2, "the factors have been trained"

    config = json.loads((tmp_path / ADAPTER / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"], config["task_type"]) == (4, 8, "none", "CAUSAL_LM")
    assert config["base_model_name_or_path"] == (lora.base_model or model)
    targets = set(config["target_modules"])
    if lora.target_modules == "all-linear":
        assert "q_proj" in targets
        assert not any("." in name for name in targets)
    else:
        assert targets == {"transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn", "transformer.h.0.mlp.c_fc"}
        assert config["fan_in_fan_out"]
    adapted.save_pretrained(str(tmp_path / "by peft"))
    ours, by_peft = (load_file(tmp_path / name / "adapter_model.safetensors") for name in (ADAPTER, "by peft"))
    assert ours.keys() == by_peft.keys()
    assert all(torch.equal(ours[name], by_peft[name]) for name in ours)


@pytest.mark.parametrize("steps", [0, 2])
def test_any_number_of_ranks_writes_the_same_files(random_models: dict[str, str], tmp_path: Path, steps: int) -> None:
    for ranks in (1, 2):
        run_ranks(ranks, train, random_models["tied"], tmp_path / str(ranks), LORA, steps)
    one, two = (tmp_path / str(ranks) / ADAPTER for ranks in (1, 2))
    assert (one / "adapter_config.json").read_bytes() == (two / "adapter_config.json").read_bytes()
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (one, two))
    assert list(first) == list(second)
    for name in first:  # sums over two ranks round in another way
        torch.testing.assert_close(
            first[name], second[name], rtol=0 if steps == 0 else 1e-4, atol=0 if steps == 0 else 1e-4
        )


@pytest.mark.parametrize("model", ["tied", "GPT2"], indirect=True)
def test_training_goes_on_from_an_adapter(model: str, tmp_path: Path) -> None:
    (fresh,) = run_ranks(1, train, model, tmp_path / "first", LORA, 2)
    again = replace(LORA, adapter_path=str(tmp_path / "first" / ADAPTER))
    (one,) = run_ranks(1, train, model, tmp_path / "one", again, 2)
    two, _ = run_ranks(2, train, model, tmp_path / "two", again, 2)
    for found in (one, two):
        np.testing.assert_allclose(found["before"], fresh["after"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found["reference"], fresh["before"], rtol=1e-5, atol=1e-5)
        assert np.abs(found["after"] - found["before"]).max() > 1e-3
    np.testing.assert_allclose(one["after"], two["after"], rtol=1e-4, atol=1e-4)


def load(rank: int, path: str, adapter: str) -> str:
    try:
        trainable_engine(path, lora=replace(LORA, adapter_path=adapter))
    except (ConfigError, DataError) as error:
        return str(error)
    return ""


def test_an_adapter_that_does_not_fit_is_refused_on_every_rank(random_models: dict[str, str], tmp_path: Path) -> None:
    run_ranks(1, train, random_models["tied"], tmp_path, LORA, 0)
    good = tmp_path / ADAPTER
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors = load_file(good / "adapter_model.safetensors")
    cases = {
        "nan": ({name: tensors[name] * torch.nan}, [name, "nan"]),
        "shape": ({name: torch.zeros(4, 5)}, [name, "(4, 5)", "base model"]),
        "module": (
            {f"base_model.model.model.layers.9.mlp.up_proj.lora_{k}.weight": torch.zeros(4, 4) for k in "AB"},
            ["model.layers.9.mlp.up_proj"],
        ),
    }
    for case, (changes, parts) in cases.items():
        folder = Path(shutil.copytree(good, tmp_path / case))
        save_file(tensors | changes, folder / "adapter_model.safetensors")
        for told in run_ranks(2, load, random_models["tied"], str(folder)):
            says(told, f"actor_rollout_ref.model.lora_adapter_path={folder}", *parts)
