"""An output layer in float32 beside layers in bf16: what it holds and gives, its gradient, and what is sent of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call

from grpo_dist.algorithms.aggregate import token_log_probs
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import model_loading
from grpo_dist.engines.train.fsdp_model import build_model, gradient_sync
from grpo_dist.engines.train.lm_head import ResponseHead
from grpo_dist.engines.train.sharded_tensors import whole
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto, metric_values
from tests.engines.train.plain import built, causal_lm, weights
from tests.messages import refuses
from tests.models import objective, random_batch, random_model, trainable_engine
from tests.ranks import run_ranks
from tests.worker_settings import lora, model_settings

TEMPERATURE = 0.7
# What bf16 layers in another layout may change: log-probs, in nats; gradients, as a share of their norm.
ROUNDING, SHARE = 0.05, 0.2
APART = {"compute_dtype": "bf16", "head_dtype": "fp32"}


def dense(path: str, data: DataProto) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probs of responses, and the gradient of their sum: layers in bf16, all logits at once in float32."""
    model = causal_lm(path)
    own = dict(model.named_parameters())
    head = model.lm_head.weight
    rounded = {name.removeprefix("model."): w.to(torch.bfloat16) for name, w in own.items() if name != "lm_head.weight"}
    log_probs = []
    for prompt, response in zip(data["prompts"].rows(), data["responses"].rows(), strict=True):
        ids = torch.cat([prompt, response]).long().unsqueeze(0)
        hidden = functional_call(model.model, rounded, (ids,)).last_hidden_state
        assert hidden.dtype == torch.bfloat16
        logits = hidden[0, len(prompt) - 1 : -1].float() @ head.t()
        log_probs.append(token_log_probs(logits, response.long(), TEMPERATURE))
    torch.cat(log_probs).sum().backward()
    return [values.detach() for values in log_probs], {name: w.grad for name, w in own.items()}


def off(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm())


def chunked(rank: int, path: str, micro_batch_size: int, factors: bool = False) -> dict[str, Any]:
    """The same by an engine, of whose ranks each has its share of the rows; then a step, and what is sent after it."""
    world = torch.distributed.get_world_size()
    data, rows = random_batch(num_groups=4, n=2), 8 // world
    data = data.slice(rank * rows, (rank + 1) * rows)
    adapters = lora(targets=("q_proj",)) if factors else None
    engine = trainable_engine(path, temperature=TEMPERATURE, dtype="bf16", head_dtype="fp32", lora=adapters)
    log_probs = engine.compute_log_probs(data, PassLimits("", micro_batch_size))
    starts = range(0, rows, micro_batch_size)
    for start in starts:
        micro_batch = engine.forward.micro_batch(data.slice(start, min(start + micro_batch_size, rows)), ())
        with gradient_sync(engine.model, engine.settings, last=start == starts[-1]):
            (engine.forward(micro_batch).log_probs.sum() * world).backward()
    own = dict(engine.model.named_parameters())
    gradients = {name: whole(w.grad) for name, w in own.items() if w.grad is not None}
    engine.optimizer.zero_grad()
    before = weights(engine)
    step = engine.train_mini_batch(data, objective(), PassLimits("", micro_batch_size))
    after = weights(engine)
    sent = {name: tensor.clone() for name, tensor in engine.full_parameters("bfloat16")}
    name = next(name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in sent)
    return {
        "report": engine.forward.report,
        "log_probs": [row.numpy().copy() for row in log_probs.rows()],
        "gradients": {name: gradient.numpy().copy() for name, gradient in gradients.items()},
        "norm": metric_values(step.metrics)["actor/grad_norm"],
        "moved": not np.array_equal(before[name], after[name]),
        "in float32": [name for name, tensor in sent.items() if tensor.dtype == torch.float32],
        "sent as it is held": np.array_equal(sent[name].numpy(), after[name]),
        "of the file": np.array_equal(before[name], model_weight(path, name)),
    }


def model_weight(path: str, name: str) -> np.ndarray:
    return causal_lm(path).get_parameter(name).detach().numpy()


@pytest.mark.deep
@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("factors", [False, True])
def test_log_probs_and_gradients_equal_the_dense_computation(
    random_models: dict[str, str], name: str, factors: bool
) -> None:
    """Whatever the micro-batches and ranks, also of the embedding's share of a weight; and beside LoRA's factors, whose
    frozen weights are held in bf16, and the output layer is not.
    """
    data, path = random_batch(num_groups=4, n=2), random_models[name]
    log_probs, gradients = dense(path, data)
    norms = []
    for ranks, micro_batch_size in ((1, 8), (1, 3), (2, 2)):
        results = run_ranks(ranks, chunked, path, micro_batch_size, factors)
        mine = torch.cat([torch.from_numpy(row) for result in results for row in result["log_probs"]])
        assert (mine - torch.cat(log_probs)).abs().mean() < ROUNDING
        for result in results:
            assert "logits" not in result["report"], "the chunked output layer is in use"
            assert result["in float32"] == ["lm_head.weight" if name == "untied" else "model.embed_tokens.weight"]
            assert result["sent as it is held"]
            assert result["of the file"]
            assert result["moved"] == (not factors), "its optimizer step"
            assert result["gradients"].keys() == gradients.keys() or factors
            for weight, gradient in result["gradients"].items() if not factors else ():
                assert off(torch.from_numpy(gradient), gradients[weight]) < SHARE, weight
            norms.append(result["norm"])
    assert factors or norms == pytest.approx([norms[0]] * len(norms), rel=SHARE)


def frozen(rank: int, path: str) -> dict[str, Any]:
    """A reference, which no rank shards, and its output layer for the exact KL; and the logits without the layer."""
    engine = built(path, temperature=TEMPERATURE, model_dtype="bf16", **APART)
    ids = torch.arange(3, 15).unsqueeze(0)
    with torch.no_grad():
        logits = engine.model(input_ids=ids).logits
        hidden = engine.model.model(input_ids=ids).last_hidden_state
    head = engine.output_layer("cpu")
    return {
        "dtypes": sorted({str(weight.dtype) for weight in engine.model.parameters()}),
        "head": str(head.weight.dtype),
        "of the file": np.array_equal(head.weight.numpy(), model_weight(path, "lm_head.weight")),
        "equal": torch.equal(logits, hidden.float() @ head.weight.t()),
        "hidden": str(hidden.dtype),
    }


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_reference_holds_it_too(random_models: dict[str, str], name: str) -> None:
    assert run_ranks(1, frozen, random_models[name]) == [
        {
            "dtypes": ["torch.bfloat16", "torch.float32"],
            "head": "torch.float32",
            "of the file": True,
            "equal": True,
            "hidden": "torch.bfloat16",
        }
    ]


def capped(rank: int, path: str) -> dict[str, Any]:
    data = random_batch(num_groups=2, n=2)
    engine = trainable_engine(path, dtype="bf16", head_dtype="fp32")
    engine.train_mini_batch(data, objective(), PassLimits("", 2))
    layer = engine.model.get_output_embeddings()
    kind = {"own": not isinstance(layer, ResponseHead), "dtype": str(layer.weight.dtype)}
    return kind | {"report": engine.forward.report}


def test_a_model_that_changes_its_logits(tmp_path: Path) -> None:
    """Its own output layer takes hidden states in bf16, and gives logits in float32."""
    path = random_model("Granite", tmp_path, logits_scaling=2.0, tie_word_embeddings=False)
    (found,) = run_ranks(1, capped, path)
    assert (found["own"], found["dtype"]) == (True, "torch.float32")
    assert "logits of whole micro-batches" in found["report"]


def distributed(rank: int, path: str) -> bool:
    """Loaded whole by rank 0 and given out tensor by tensor."""
    model_loading._why_whole = lambda model, shards: "the test says so"  # type: ignore[assignment]
    engine = trainable_engine(path, dtype="bf16", head_dtype="fp32", lora=lora(targets=("q_proj",)))
    return np.array_equal(weights(engine)["lm_head.weight"], model_weight(path, "lm_head.weight"))


@pytest.mark.deep
def test_loaded_by_one_rank_it_is_not_rounded(random_models: dict[str, str]) -> None:
    assert run_ranks(2, distributed, random_models["untied"]) == [True, True]


def test_it_is_apart_only_from_layers_of_another_type() -> None:
    for changes, apart in (
        ({}, True),
        ({"compute_dtype": "fp32", "model_dtype": "bf16"}, True),
        ({"compute_dtype": "fp32"}, False),
        ({"head_dtype": None}, False),
    ):
        assert model_settings(**(APART | changes)).head_apart == apart, changes


def test_an_embedding_that_scales_its_rows_is_refused(tmp_path: Path) -> None:
    path = random_model("Gemma", tmp_path, head_dim=8)
    with refuses(ConfigError, "actor_rollout_ref.model.head_dtype=fp32", "GemmaTextScaledWordEmbedding", "null"):
        build_model(model_settings(path, **APART), "cpu", 1)
