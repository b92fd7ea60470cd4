"""Supervised fine-tuning: steps equal those in plain PyTorch, however they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from grpo_dist.algorithms.settings import SFTSettings
from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import end_token_ids
from grpo_dist.config.schema_roles import LoraSection
from grpo_dist.data import load_tokenizer
from grpo_dist.data.training_rows import Conversation, training_batch
from grpo_dist.data.training_tokens import tokenize_chats
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.forward import PolicyForward, ValueForward
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.objectives import SFTObjective
from grpo_dist.protocol import DataProto, Ragged, merge_metrics, metric_values
from grpo_dist.tasks import arithmetic
from tests.models import random_batch, trainable_engine
from tests.ranks import run_ranks
from tests.worker_settings import lora

LR, EPS, STEPS = 1e-2, 1e-2, 2
LORA = lora()


def conversations() -> DataProto:
    """Eight rows, of which two each have the same prompt; about two thirds of the response tokens train."""
    data = random_batch(num_groups=4, n=2, seed=5).select(("prompts", "responses", "uid"))
    rng = np.random.default_rng(6)
    masks = [rng.random(int(length)) < 2 / 3 for length in data["responses"].lengths]
    mask = Ragged.from_rows([np.append(row[:-1], True) for row in masks], torch.int8)
    return DataProto({**data.batch, "response_mask": mask}, data.non_tensor_batch)


def engine(path: str, layout: str, lora: LoraSection | None = None) -> FSDPEngine:
    """AdamW with a large eps: a small one divides gradients by their size, and makes real steps of rounding."""
    made = trainable_engine(path, lr=LR, temperature=1.0, layout=layout, lora=lora)
    made.grad_clip = float("inf")
    made.optimizer.param_groups[0]["eps"] = EPS
    return made


# Ranks' rows, layout, and limits of a pass.
HALVES = ([0, 1, 2, 5, 7], [3, 4, 6])
CUTS: dict[str, tuple[Sequence[Sequence[int]], str, dict[str, Any]]] = {
    "padded, one pass": ([range(8)], "padded", {"limits": PassLimits("", 8)}),
    "packed, one pass": ([range(8)], "packed", {"limits": PassLimits("", 8)}),
    "packed, alone": ([range(8)], "packed", {"limits": PassLimits("", 1)}),
    "packed, passes of 25 tokens": ([range(8)], "packed", {"limits": PassLimits("", 1, 25)}),
    "shared, one pass": ([range(8)], "shared", {"limits": PassLimits("", 8)}),
    "shared, passes of three": ([range(8)], "shared", {"limits": PassLimits("", 3)}),
    "two ranks, packed": (HALVES, "packed", {"limits": PassLimits("", 2)}),
    "two ranks, shared": (HALVES, "shared", {"limits": PassLimits("", 3)}),
    "two ranks, padded, one without rows": ([range(8), []], "padded", {"limits": PassLimits("", 4)}),
}


def train(rank: int, path: str, cuts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Some steps on the same rows in each cut."""
    out = {}
    for cut, (shards, layout, limits) in cuts.items():
        made = engine(path, layout)
        own = conversations().index(list(shards[rank]))
        results = [made.train_mini_batch(own, objective=SFTSettings(), **limits) for _ in range(STEPS)]
        out[cut] = {
            "metrics": [result.metrics for result in results],
            "weights": {name: tensor.numpy().copy() for name, tensor in made.full_parameters("float32")},
            "report": made.forward.report,
            "log_probs": results[0].log_probs,
        }
    return out


def plain_steps(path: str) -> dict[str, Any]:
    """The same in plain PyTorch, each sequence alone."""
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.01, eps=EPS)
    data = conversations()
    steps = []
    for _ in range(STEPS):
        logits, targets = [], []
        rows = (data[name].rows() for name in ("prompts", "responses", "response_mask"))
        for prompt, response, mask in zip(*rows, strict=True):
            ids = torch.cat([prompt, response]).long()
            found = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
            logits.append(found[mask.bool()])
            targets.append(response[mask.bool()].long())
        loss = cross_entropy(torch.cat(logits), torch.cat(targets))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"sft/loss": loss.item(), "sft/grad_norm": norm, "sft/lr": LR, "sft/skipped_updates": 0.0})
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    return {"metrics": steps, "weights": weights}


@pytest.fixture(scope="module")
def path(random_models: dict[str, str]) -> str:
    return random_models["tied"]


@pytest.fixture(scope="module")
def runs(path: str) -> dict[str, list[dict[str, Any]]]:
    """By cut: what each rank has."""
    found: dict[str, list[dict[str, Any]]] = {}
    for size in (1, 2):
        ranks = run_ranks(size, train, path, {name: cut for name, cut in CUTS.items() if len(cut[0]) == size})
        found |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return found


@pytest.fixture(scope="module")
def expected(path: str) -> dict[str, Any]:
    with torch.enable_grad():
        return plain_steps(path)


@pytest.mark.parametrize("cut", list(CUTS))
def test_steps_equal_plain_pytorch(runs: dict[str, Any], expected: dict[str, Any], cut: str) -> None:
    ranks = runs[cut]
    for step, wanted in enumerate(expected["metrics"]):
        metrics = metric_values(merge_metrics([rank["metrics"][step] for rank in ranks]))
        assert metrics == pytest.approx(wanted, rel=5e-5, abs=1e-6)
    for rank in ranks:
        assert rank["log_probs"] is None
        for name, weight in expected["weights"].items():
            np.testing.assert_allclose(rank["weights"][name], weight, rtol=1e-4, atol=1e-5, err_msg=name)
        assert CUTS[cut][1][:4] in rank["report"], "in the layout that was asked for"
        assert "instead" not in rank["report"]


def test_the_steps_prove_something(expected: dict[str, Any], path: str) -> None:
    """Every weight moves by more than the tolerance, the loss falls, and some tokens do not train."""
    auto: Any = transformers.AutoModelForCausalLM
    for name, weight in auto.from_pretrained(path, dtype=torch.float32).named_parameters():
        assert np.abs(weight.detach().numpy() - expected["weights"][name]).max() > 1e-4, name
    first, last = (step["sft/loss"] for step in expected["metrics"])
    assert last < first
    share = conversations()["response_mask"].values.float().mean().item()
    assert 0.3 < share < 0.9


def train_otherwise(rank: int, path: str) -> dict[str, Any]:
    """With LoRA's factors, and on rows of which nothing trains."""
    data = conversations()
    lora = engine(path, "shared", LORA)
    before = {name: tensor.clone() for name, tensor in lora.full_parameters("float32")}
    steps = [lora.train_mini_batch(data, SFTSettings(), PassLimits("", 3)) for _ in range(3)]
    merged = dict(lora.full_parameters("float32"))
    nothing = DataProto(
        {
            **data.batch,
            "response_mask": Ragged(torch.zeros_like(data["response_mask"].values), data["responses"].offsets),
        },
        data.non_tensor_batch,
    )
    skipped = lora.train_mini_batch(nothing, SFTSettings(), PassLimits("", 8))
    return {
        "losses": [metric_values(step.metrics)["sft/loss"] for step in steps],
        "moved": {name for name in merged if not torch.equal(merged[name], before[name])},
        "skipped": metric_values(skipped.metrics),
        "still": all(torch.equal(merged[name], now) for name, now in lora.full_parameters("float32")),
    }


def test_lora_trains_the_factors_alone_and_nothing_trains_without_tokens(path: str, expected: dict[str, Any]) -> None:
    (found,) = run_ranks(1, train_otherwise, path)
    assert found["losses"][0] == pytest.approx(expected["metrics"][0]["sft/loss"], rel=5e-5), "factors begin at 0"
    assert found["losses"][2] < found["losses"][1] < found["losses"][0]
    assert found["moved"] == {name for name in expected["weights"] if name.endswith("_proj.weight")}
    assert (found["skipped"]["sft/loss"], found["skipped"]["sft/skipped_updates"]) == (0.0, 1.0)
    assert found["still"]


# --- the built-in task ---------------------------------------------------------------------------------------------
def learn_sums(rank: int, path: str) -> dict[str, Any]:
    """Losses of steps on the right answers to questions of the built-in task, and the mean of -log pi before them."""
    tokenizer = load_tokenizer(path, trust_remote_code=False)
    chats = []
    for i, row in enumerate(arithmetic.rows("train")[:64]):
        answer = {"role": "assistant", "content": f"#### {row['reward_model']['ground_truth']}"}
        chats.append(Conversation(f"row {i}", [*row["prompt"], answer], (1,)))
    options: dict[str, Any] = {"max_length": 100, "apply_chat_template_kwargs": {}}
    ends = end_token_ids(path, setting="the built-in model")
    examples, _ = tokenize_chats(chats, tokenizer, end_ids=ends, **options)
    made = trainable_engine(path, lr=1e-4, temperature=1.0, layout="packed")
    own = training_batch(examples, "response_mask")
    log_probs = made.compute_log_probs(own, PassLimits("", 64)).values
    mean = -log_probs[own["response_mask"].values.bool()].mean().item()
    losses = []
    for _ in range(6):
        metrics = made.train_mini_batch(own, SFTSettings(), PassLimits("", 32)).metrics
        losses.append(metric_values(metrics)["sft/loss"])
    return {"mean": mean, "losses": losses}


def test_the_built_in_model_learns_answers() -> None:
    (found,) = run_ranks(1, learn_sums, resolve_model_path("builtin:tiny-qwen3"))
    assert found["losses"][0] == pytest.approx(found["mean"], rel=1e-4)
    assert found["losses"][-1] < 0.8 * found["losses"][0]


def test_the_loss_is_that_of_a_causal_lm_at_temperature_1() -> None:
    for kind, temperature in ((PolicyForward, 0.7), (ValueForward, 1.0)):
        forward = object.__new__(kind)
        forward.temperature = temperature
        with pytest.raises(AssertionError):
            SFTObjective(SFTSettings(), forward, None)
