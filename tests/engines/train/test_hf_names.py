"""What goes out has the names, the shapes and the numbers of the files; a part of it at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from grpo_dist.engines.train.model_loading import as_in_files, lost_names
from tests.models import EXPERTS, random_model

DEEPSEEK = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
DEEPSEEK |= {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 8},  # nothing is converted
    "Qwen3Moe": {"head_dim": 8, **EXPERTS},
    "Mixtral": EXPERTS,  # other names too
    "Olmoe": EXPERTS,
    "DeepseekV3": EXPERTS | DEEPSEEK | {"num_key_value_heads": 4},  # a buffer that steers the router
}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_numbers_of_the_files(family: str, tmp_path: Path) -> None:
    path = random_model(family, tmp_path, **FAMILIES[family])
    files = load_file(Path(path, "model.safetensors"))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert (held.keys() <= files.keys()) == (family == "Qwen3"), "there is something to convert"
    given: list[str] = []

    def one_by_one() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in held.items():
            given.append(name)
            yield name, tensor

    found, ahead = {}, []
    for name, tensor in as_in_files(model, one_by_one()):
        assert name not in found
        found[name] = tensor
        ahead.append(len(given))
    assert found.keys() == files.keys()
    assert all(torch.equal(tensor, files[name]) for name, tensor in found.items())
    assert ahead[0] == 1, "the first tensor goes out before the second one comes"


def test_experts_are_apart(tmp_path: Path) -> None:
    """By hand: expert 3's gate is the upper half of its rows in the stack, its up projection the lower one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        random_model("Qwen3Moe", tmp_path, **FAMILIES["Qwen3Moe"]), dtype=torch.float32
    )
    prefix = "model.layers.1.mlp.experts"
    stack = model.get_parameter(f"{prefix}.gate_up_proj").detach()
    assert stack.shape == (8, 2 * 48, 32)
    found = dict(as_in_files(model, ((name, p.detach()) for name, p in model.named_parameters())))
    assert torch.equal(found[f"{prefix}.3.gate_proj.weight"], stack[3, :48])
    assert torch.equal(found[f"{prefix}.3.up_proj.weight"], stack[3, 48:])
    assert f"{prefix}.gate_up_proj" not in found


def test_names_that_would_be_lost(tmp_path: Path) -> None:
    """Without a way back the stacks of two layers go out as they are, and no file has them."""
    path = random_model("Qwen3Moe", tmp_path, **FAMILIES["Qwen3Moe"])
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to("meta")
    model.tie_weights()
    files = {name: tensor.to("meta") for name, tensor in load_file(Path(path, "model.safetensors")).items()}
    assert lost_names(model, files) == []
    up = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert lost_names(model, files | {up: torch.empty(49, 32, device="meta")}) == [up]
    assert lost_names(model, {name: tensor for name, tensor in files.items() if name != up}) == [up]
    model._weight_conversions = []
    stacks = [f"model.layers.{i}.mlp.experts.{name}" for i in range(2) for name in ("down_proj", "gate_up_proj")]
    assert lost_names(model, files) == stacks
