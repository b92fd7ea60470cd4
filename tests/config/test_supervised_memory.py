"""The memory of a rank that trains one model: by hand, and what is advised where it is full."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config.load import load_command
from grpo_dist.config.memory import RoleMemory
from grpo_dist.config.supervised import REWARD_MODEL, SFT
from grpo_dist.config.supervised_memory import memory_estimate
from grpo_dist.errors import ConfigError
from grpo_dist.sizes import GIB
from tests.config.test_memory import LAYER, MATRIX, SHAPE
from tests.memory_cells import MODELS
from tests.messages import refuses, says

# An embedding, two layers and a norm; the output layer of the causal LM is not loaded, and the head has 8 numbers.
PARAMETERS = 2 * LAYER + MATRIX + 8
TOKENS = 2 * 16
SMALL = ("trainer.n_gpus_per_node=2", "data.max_length=16", "data.micro_batch_size_per_gpu=2")


def plan(tmp_path: Path, *overrides: str, command: Any = REWARD_MODEL, shape: dict[str, Any] = SHAPE) -> RoleMemory:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config, _ = load_command([f"model.path={tmp_path}", *SMALL, *overrides], command)
    found = memory_estimate(config, shape)
    assert found is not None
    return found


def test_weights_gradients_and_states_are_halved_by_two_ranks(tmp_path: Path) -> None:
    two, one = plan(tmp_path), plan(tmp_path, "trainer.n_gpus_per_node=1")
    for name, size in (("weights", 4), ("gradients", 4), ("optimizer", 8)):
        assert two.parts[name] * GIB == pytest.approx(PARAMETERS * size / 2), name
        assert one.parts[name] * GIB == pytest.approx(PARAMETERS * size), name
    assert two.role == "reward_model"
    assert two.host["a copy for a checkpoint"] * GIB == pytest.approx(PARAMETERS * 12 / 2)
    assert "logits" not in two.parts or two.parts["logits"] == 0, "there is no output layer"


def test_copies_of_the_weights(tmp_path: Path) -> None:
    four = ("trainer.n_gpus_per_node=4", "engine.fsdp_size=2")
    assert plan(tmp_path, *four).parts["weights"] == plan(tmp_path).parts["weights"]


def test_states_that_wait_in_cpu_memory(tmp_path: Path) -> None:
    kept, away = plan(tmp_path), plan(tmp_path, "engine.optimizer_offload=true")
    assert away.total < kept.total
    assert away.host["offloaded"] * GIB == pytest.approx(PARAMETERS * 8 / 2)
    both = plan(tmp_path, "engine.optimizer_offload=true", "engine.param_offload=true")
    assert both.host["offloaded"] * GIB == pytest.approx(PARAMETERS * 12 / 2)


def test_longer_rows_and_passes_take_more(tmp_path: Path) -> None:
    base = plan(tmp_path, "data.max_length=64").total
    assert plan(tmp_path, "data.max_length=128").total > base
    assert plan(tmp_path, "data.max_length=64", "data.micro_batch_size_per_gpu=4").total > base
    assert plan(tmp_path, "data.max_length=64", "model.enable_gradient_checkpointing=false").total > base
    alone = plan(tmp_path, "data.max_length=64", "data.micro_batch_size_per_gpu=1").total
    assert alone == base, "both answers of a pair are in one pass"


def test_a_pair_is_in_one_pass_whatever_the_budget(tmp_path: Path) -> None:
    budget = ("data.max_length=64", "data.use_dynamic_bsz=true")
    pair, longest = (plan(tmp_path, *budget, f"data.max_token_len_per_gpu={tokens}").total for tokens in (128, 64))
    assert longest == pair
    chats = [plan(tmp_path, *budget, f"data.max_token_len_per_gpu={n}", command=SFT).total for n in (128, 64)]
    assert chats[1] < chats[0]


def test_a_language_model_has_an_output_layer_and_may_have_factors(tmp_path: Path) -> None:
    whole = plan(tmp_path, command=SFT)
    assert whole.parts["weights"] * GIB == pytest.approx((PARAMETERS + MATRIX) * 4 / 2)
    assert whole.role == "sft"
    lora = plan(tmp_path, "model.lora_rank=1", command=SFT)
    assert lora.total < whole.total


def test_sizes_that_are_not_known() -> None:
    config, _ = load_command([], REWARD_MODEL)
    assert memory_estimate(config, None) is None
    assert memory_estimate(config, {"model_type": "unheard_of"}) is None


def test_qwen3_8b_on_eight_gpus(tmp_path: Path) -> None:
    """16 bytes a parameter of 7.6 billion without the output layer, over 8 ranks, and passes of 16,384 tokens."""
    sizes = ("trainer.n_gpus_per_node=8", "data.max_length=2048", "data.micro_batch_size_per_gpu=8")
    found = plan(tmp_path, *sizes, shape=MODELS["Qwen3-8B"])
    assert sum(found.parts[name] for name in ("weights", "gradients", "optimizer")) * GIB == pytest.approx(
        7.57e9 * 16 / 8, rel=0.01
    )
    assert found.total < 79 * 2 / 3


# --- what does not fit -----------------------------------------------------------------------------------------------
QWEN = ("trainer.n_gpus_per_node=8", "data.max_length=2048")
TOO_LARGE = {
    "whole gradients": ("Qwen3-8B", 50, (*QWEN, "engine.defer_grad_sync=true"), "engine.defer_grad_sync=false"),
    "activations": (
        "Qwen3-1.7B", 24, (*QWEN, "model.enable_gradient_checkpointing=false"),
        "model.enable_gradient_checkpointing=true",
    ),
    "passes": ("Qwen3-1.7B", 24, (*QWEN, "data.micro_batch_size_per_gpu=128"), "data.micro_batch_size_per_gpu="),
    "passes by tokens": (
        "Qwen3-1.7B", 24, (*QWEN, "data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=262144"),
        "data.max_token_len_per_gpu=",
    ),
    "states": ("Qwen3-8B", 17, (*QWEN, "data.micro_batch_size_per_gpu=1"), "engine.optimizer_offload=true"),
    "weights": ("Qwen3-14B", 40, ("trainer.n_gpus_per_node=1", "data.max_length=2048"), "trainer.nnodes="),
}  # fmt: skip


@pytest.mark.parametrize("case", TOO_LARGE)
def test_what_is_too_large_is_refused_and_with_what_is_advised_it_fits(case: str, tmp_path: Path) -> None:
    model, gib, overrides, remedy = TOO_LARGE[case]
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model] | {"model_type": "qwen3"}))
    run = [f"model.path={tmp_path}", "data=arithmetic", f"cluster.gpu_memory_gib={gib}", *overrides]
    with refuses(ConfigError, f"model.path={tmp_path}", f"cluster.gpu_memory_gib={gib}") as caught:
        load_command(run, REWARD_MODEL)
    told = str(caught.value)
    advised = re.findall(r"[a-z_]+(?:\.[a-z_]+)+=[\w.]+", told.rpartition("; set ")[2])
    assert any(each.startswith(remedy) for each in advised), told
    load_command([*run, *advised], REWARD_MODEL)


def test_what_no_setting_makes_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-32B"] | {"model_type": "qwen3"}))
    run = [f"model.path={tmp_path}", "data=arithmetic", "cluster.gpu_memory_gib=2", "trainer.n_gpus_per_node=1"]
    with pytest.raises(ConfigError) as caught:
        load_command(run, REWARD_MODEL)
    says(caught, "smaller model", "trainer.nnodes")
