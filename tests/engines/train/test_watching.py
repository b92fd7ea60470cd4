"""What is noted of the trainer's operations is what they compute, and watching changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_dist.engines.train.sharded_tensors import whole
from grpo_dist.engines.train.watching import watched
from tests.models import random_batch, random_qwen3, trainable_engine
from tests.ranks import run_ranks

TEMPERATURE = 0.7
EPS = torch.finfo(torch.float32).eps


def one_rank(rank: int, path: str) -> dict[str, Any]:
    row = random_batch(num_groups=1, n=1).slice(0, 1)
    engine = trainable_engine(path, temperature=TEMPERATURE)
    plain = engine.compute_log_probs(row, micro_batch_size=1).values
    seen, wobbled, again = watched(engine, row), watched(engine, row, EPS), watched(engine, row, EPS)
    after = engine.compute_log_probs(row, micro_batch_size=1).values
    head = whole(engine.model.get_output_embeddings().weight.detach())
    found = {
        "prompt": {"ids": row["prompts"].values},
        "response": {"ids": row["responses"].values},
        "log_probs": {"before": plain, "after": after},
        "head": {"weight": head},
        "seen": seen,
        "wobbled": wobbled,
        "again": again,
    }
    return {name: {key: each.numpy().copy() for key, each in part.items()} for name, part in found.items()}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    [found] = run_ranks(1, one_rank, random_qwen3(tmp_path_factory.mktemp("model")))
    return {name: {key: torch.from_numpy(each) for key, each in part.items()} for name, part in found.items()}


def test_operations_are_noted_in_their_order_with_a_row_for_each_token(done: dict[str, dict[str, Tensor]]) -> None:
    prompt, response = done["prompt"]["ids"], done["response"]["ids"]
    length, seen = len(prompt) + len(response), done["seen"]
    layer = "model.layers.1"
    parts = ("q_proj", "q_norm", "rope.q", "attention", "o_proj")
    names = [
        "model.embed_tokens",
        f"{layer}.input_layernorm",
        *(f"{layer}.self_attn.{part}" for part in parts),
        f"{layer}.post_attention_layernorm",
        f"{layer}.mlp",
        layer,
        "model.norm",
        "lm_head",
        "log_probs",
    ]
    assert [name for name in seen if name in names] == names
    widths = [32, 32, *[32] * len(parts), 32, 32, 32, 32]
    assert [tuple(seen[name].shape) for name in names[:-2]] == [(length, width) for width in widths]
    assert seen["lm_head"].shape == (len(response), 96)


def test_they_are_what_is_computed(done: dict[str, dict[str, Tensor]]) -> None:
    prompt, response = done["prompt"]["ids"], done["response"]["ids"]
    seen, before = done["seen"], len(prompt) - 1
    logits = seen["model.norm"][before : before + len(response)] @ done["head"]["weight"].T
    torch.testing.assert_close(seen["lm_head"], logits)
    expected = torch.log_softmax(logits / TEMPERATURE, -1).gather(1, response.long().unsqueeze(1))
    torch.testing.assert_close(seen["log_probs"], expected)
    rotated = seen["model.layers.0.self_attn.rope.k"].view(-1, 2, 8).norm(dim=2)
    plain = seen["model.layers.0.self_attn.k_norm"].view(-1, 2, 8).norm(dim=2)
    torch.testing.assert_close(rotated, plain)  # a rotation keeps lengths
    stream = seen["model.layers.0"] - seen["model.layers.0.mlp"] - seen["model.layers.0.self_attn.o_proj"]
    torch.testing.assert_close(stream, seen["model.embed_tokens"])


def test_watching_changes_nothing(done: dict[str, dict[str, Tensor]]) -> None:
    before, after = done["log_probs"]["before"], done["log_probs"]["after"]
    assert torch.equal(before, done["seen"]["log_probs"][:, 0])
    assert torch.equal(before, after)


def test_wobbling_moves_every_number_by_its_last_place_and_goes_on(done: dict[str, dict[str, Tensor]]) -> None:
    seen, wobbled = done["seen"], done["wobbled"]
    first = "model.embed_tokens"
    moved = (wobbled[first] - seen[first]).abs() / seen[first].abs()
    torch.testing.assert_close(moved, torch.full_like(moved, EPS), rtol=0.6, atol=0)
    for name in ("model.norm", "lm_head", "log_probs"):
        size = (wobbled[name] - seen[name]).abs().max()
        assert 0 < size < 1e-3, name
    assert all(torch.equal(wobbled[name], done["again"][name]) for name in wobbled), "the same each time"
