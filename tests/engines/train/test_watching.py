"""What is noted of the trainer's operations is what they compute, and watching changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.sharded_tensors import whole
from grpo_dist.engines.train.watching import log_probs_in, watched
from tests.engines.train.plain import causal_lm, log_probs_alone
from tests.models import EXPERTS, random_batch, random_model, random_qwen3, trainable_engine
from tests.ranks import run_ranks

TEMPERATURE = 0.7
EPS = torch.finfo(torch.float32).eps


def one_rank(rank: int, path: str) -> dict[str, Any]:
    row = random_batch(num_groups=1, n=1).slice(0, 1)
    engine = trainable_engine(path, temperature=TEMPERATURE)
    plain = engine.compute_log_probs(row, PassLimits("", 1)).values
    seen, wobbled, again = watched(engine, row), watched(engine, row, EPS), watched(engine, row, EPS)
    found = {"seen": seen, "wobbled": wobbled, "again": again}
    found |= {name: {"ids": row[f"{name}s"].values} for name in ("prompt", "response")}
    found["log_probs"] = {"before": plain, "after": engine.compute_log_probs(row, PassLimits("", 1)).values}
    found["head"] = {"weight": whole(engine.model.get_output_embeddings().weight.detach())}
    return {name: {key: each.numpy().copy() for key, each in part.items()} for name, part in found.items()}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    [found] = run_ranks(1, one_rank, random_qwen3(tmp_path_factory.mktemp("model")))
    return {name: {key: torch.from_numpy(each) for key, each in part.items()} for name, part in found.items()}


def test_what_is_noted_is_what_is_computed_and_watching_changes_nothing(done: dict[str, dict[str, Tensor]]) -> None:
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
    assert torch.equal(done["log_probs"]["before"], seen["log_probs"][:, 0])
    assert torch.equal(done["log_probs"]["before"], done["log_probs"]["after"])


def test_wobbling_moves_every_number_by_its_last_place_and_goes_on(done: dict[str, dict[str, Tensor]]) -> None:
    """The same each time."""
    seen, wobbled, first = done["seen"], done["wobbled"], "model.embed_tokens"
    moved = (wobbled[first] - seen[first]).abs() / seen[first].abs()
    torch.testing.assert_close(moved, torch.full_like(moved, EPS), rtol=0.6, atol=0)
    assert all(0 < (wobbled[name] - seen[name]).abs().max() < 1e-3 for name in ("model.norm", "lm_head", "log_probs"))
    assert all(torch.equal(wobbled[name], done["again"][name]) for name in wobbled)


def in_both_types(rank: int, path: str, world_size: int, layout: str) -> dict[str, Any]:
    data, found = random_batch(num_groups=4, n=2).index(np.arange(rank, 8, world_size)), {}
    for dtype, other in (("fp32", torch.bfloat16), ("bf16", torch.float32)):
        engine = trainable_engine(path, dtype=dtype, temperature=TEMPERATURE, layout=layout)
        before, changed = engine.compute_log_probs(data, PassLimits("", 4)), log_probs_in(engine, data, other)
        with pytest.raises(RuntimeError):  # no product of whole numbers and a weight
            log_probs_in(engine, data, torch.int64)
        after = engine.compute_log_probs(data, PassLimits("", 4))
        assert torch.equal(before.values, after.values), "the weights are what they were"
        found[dtype] = [each.values.numpy().copy() for each in (before, changed)]
    return found


def alone(path: str, *, rounded: bool) -> list[Tensor]:
    """Log-probs by the model itself, in float32, with weights that are rounded to bf16 or not."""
    model = causal_lm(path)
    for weight in model.parameters() if rounded else ():
        weight.data = weight.data.bfloat16().float()
    with torch.no_grad():
        return log_probs_alone(model, random_batch(4, 2), TEMPERATURE)


@pytest.mark.parametrize(
    ("family", "changes", "world_size", "layout"),
    [
        ("Qwen3", {"head_dim": 8}, 2, "shared"),
        ("Qwen3Moe", {"head_dim": 8} | EXPERTS, 1, "packed"),
        ("GPT2", {}, 1, "padded"),
    ],
)
def test_a_pass_in_another_type_is_that_of_a_trainer_of_that_type(
    tmp_path: Path, family: str, changes: dict[str, Any], world_size: int, layout: str
) -> None:
    """In float32 what rounding did is mostly gone; what is left are the attention's kernels, which stay in bf16."""
    path = random_model(family, tmp_path, **changes)
    exact, rounded = (alone(path, rounded=each) for each in (False, True))
    for rank, found in enumerate(run_ranks(world_size, in_both_types, path, world_size, layout)):
        (own32, in16), (own16, in32) = (map(torch.from_numpy, found[dtype]) for dtype in ("fp32", "bf16"))
        torch.testing.assert_close(own32, torch.cat(exact[rank::world_size]), atol=1e-5, rtol=1e-5)
        off16, off32 = ((each - torch.cat(rounded[rank::world_size])).abs().mean() for each in (own16, in32))
        assert off32 < 0.7 * off16
        assert 0.5 * off16 < (own16 - in32).abs().mean() < 1.5 * off16
        assert (in16 - own16).abs().mean() < 1.5 * off16 < 3 * (in16 - own32).abs().mean()
