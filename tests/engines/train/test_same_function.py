"""The pass that trains computes what the passes before it did: no dropout, and recomputed layers change nothing."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from grpo_dist.config.schema_roles import LoraSection
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.fsdp_model import recompute_layers
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto, metric_values
from tests.messages import refuses
from tests.models import objective, random_batch, random_model, trainable_engine
from tests.ranks import run_ranks
from tests.worker_settings import lora

DROPOUT = {
    "GPT2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "Llama": {"attention_dropout": 0.1},  # a number that the attention reads, no module
}


def ratios(rank: int, path: str) -> dict[str, Any]:
    """The old log-probs, those of the update's own pass, and the update's metrics where it compares the two."""
    data = random_batch(num_groups=4, n=2)
    engine = trainable_engine(path, gradient_checkpointing=True)
    old = engine.compute_log_probs(data, PassLimits("", 8))
    rest = data.select([name for name in data.columns() if name != "old_log_probs"])
    compared = rest.union(DataProto({"old_log_probs": old}))
    metrics = engine.train_mini_batch(compared, objective(), PassLimits("", 8)).metrics
    again = trainable_engine(path, gradient_checkpointing=True)
    own = again.train_mini_batch(rest, objective(on_policy=True), PassLimits("", 8)).log_probs
    assert own is not None
    return {"old": old.values.numpy(), "own": own.values.numpy(), "metrics": metric_values(metrics)}


@pytest.mark.parametrize("family", DROPOUT)
def test_a_model_with_dropout_trains_on_the_policy_that_sampled(family: str, tmp_path: Path) -> None:
    (found,) = run_ranks(1, ratios, random_model(family, tmp_path, **DROPOUT[family]))
    np.testing.assert_allclose(found["own"], found["old"], atol=1e-5)
    assert found["metrics"]["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert found["metrics"]["actor/pg_clipfrac"] == 0


def steps(rank: int, path: str, lora: LoraSection | None) -> dict[str, Any]:
    out = {}
    for recomputed in (False, True):
        torch.manual_seed(1)  # LoRA's first factors
        engine = trainable_engine(path, lora=lora, gradient_checkpointing=recomputed)
        runs: list[int] = []
        norm = engine.model.get_submodule("model.layers.1.input_layernorm")
        norm.register_forward_hook(lambda *args, runs=runs: runs.append(1))
        data = random_batch(num_groups=4, n=2).index(np.arange(8)[rank :: torch.distributed.get_world_size()])
        engine.compute_log_probs(data, PassLimits("", 8))
        before = len(runs)
        metrics = engine.train_mini_batch(data, objective(), PassLimits("", 8)).metrics
        weights = {name: tensor.numpy().copy() for name, tensor in engine.full_parameters("float32")}
        out[recomputed] = len(runs) - before, metrics["actor/grad_norm"].value, weights
    return out


@pytest.mark.deep
@pytest.mark.parametrize("lora", [None, lora()])
def test_layers_are_computed_again_in_the_backward_pass(lora: LoraSection | None, tmp_path: Path) -> None:
    for found in run_ranks(2, steps, random_model("Qwen3", tmp_path, head_dim=8), lora):
        kept, recomputed = found[False], found[True]
        assert (kept[0], recomputed[0]) == (1, 2)
        assert recomputed[1] == pytest.approx(kept[1], rel=1e-5)
        for name, weights in kept[2].items():
            np.testing.assert_allclose(recomputed[2][name], weights, atol=1e-5, err_msg=name)


class Elsewhere(torch.autograd.graph.saved_tensors_hooks):
    """Keeps copies, and notes their shapes."""

    def __init__(self, kept: list[tuple[int, ...]]) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tuple(tensor.shape))
            return tensor.clone()

        super().__init__(pack, torch.clone)


def test_what_layers_keep_may_be_elsewhere(tmp_path: Path) -> None:
    """Their inputs, and nothing else: no weights, and not what is computed again."""
    tokens = torch.arange(3, 17).view(2, 7)
    path, kept, gradients = random_model("Qwen3", tmp_path, head_dim=8), [], []
    for keeping in (contextlib.nullcontext, functools.partial(Elsewhere, kept)):
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        recompute_layers(model, "model", keeping)
        model(tokens).logits.square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert kept == [(2, 7, model.config.hidden_size)] * model.config.num_hidden_layers
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(random_model("Qwen3", tmp_path, head_dim=8))
    model.model.layers = torch.nn.ModuleList()
    model._no_split_modules = None
    with refuses(ConfigError, "enable_gradient_checkpointing=true", "false"):
        recompute_layers(model, "model")
