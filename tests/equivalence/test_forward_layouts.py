"""Padded, packed and shared give the same log-probs, entropies, loss and gradients, however rows are cut."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from grpo_dist.engines.settings import PassLimits
from grpo_dist.protocol import DataProto, Ragged, merge_metrics, metric_values
from scripts.architectures import judge
from tests.engines.train.plain import log_probs_alone, weights, with_sgd
from tests.models import EXPERTS, GATED_DELTA_NET, objective, random_batch, random_model
from tests.ranks import run_ranks

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen2": {},  # biases in attention
    "Qwen3": {"head_dim": 8},  # norms of queries and keys
    "Qwen3Moe": {"head_dim": 8, **EXPERTS},  # tokens choose experts: their neighbours must not change that
    "Qwen3_5Text": {"head_dim": 8, "initializer_range": 0.08, **GATED_DELTA_NET},  # a state goes from token to token
}
LR = 0.1
TEMPERATURE = 0.7
OBJECTIVE = objective(kl_loss_type="unbiased_k3", off_policy_threshold=1.0)
# layout, sequences per micro-batch, token budget
WAYS: dict[str, tuple[str, int, int | None]] = {
    "padded": ("padded", 100, None),
    "padded, 3 rows at a time": ("padded", 3, None),
    "packed": ("packed", 100, None),
    "packed, 60 tokens at a time": ("packed", 1, 60),
    "shared": ("shared", 100, None),
    "shared, 3 rows at a time": ("shared", 3, None),
    "shared, 40 tokens at a time": ("shared", 1, 40),
    "packed, each segment alone": ("packed", 100, None),
    "shared, each segment alone": ("shared", 5, None),
}


def batch() -> DataProto:
    """Four groups of 1, 2, 5 and 6 rows in mixed order, with masked tokens."""
    data = random_batch(num_groups=4, n=6)
    rows = [0, 6, 7, *range(12, 17), *range(18, 24)]
    data = data.index(np.random.default_rng(3).permutation(rows))
    data["response_mask"].values[::7] = 0
    noise = torch.from_numpy(np.random.default_rng(4).normal(0, 0.2, len(data["old_log_probs"].values))).float()
    sampler = data["old_log_probs"].values + noise
    return data.union(DataProto({"rollout_log_probs": Ragged(sampler, data["old_log_probs"].offsets)}))


def one_way(rank: int, path: str, shards: list[list[int]], way: str) -> dict[str, Any]:
    layout, size, budget = WAYS[way]
    limits: dict[str, Any] = {"limits": PassLimits("", size, budget)}
    engine = with_sgd(path, LR, TEMPERATURE, layout=layout)  # whose step is the gradient
    data = batch().index(shards[rank])
    if "alone" in way:  # as long ones are
        engine.forward.batched_tokens = 0
    before = weights(engine)
    columns = engine.compute_columns(data, ("log_probs", "entropies", "gradient_norms"), **limits)
    metrics = engine.train_mini_batch(data, objective=OBJECTIVE, **limits).metrics
    return {
        "columns": {name: column.values.numpy().copy() for name, column in columns.items()},
        "metrics": metrics,
        "gradients": {name: (before[name] - weight) / LR for name, weight in weights(engine).items()},
        "report": engine.forward.report,
    }


def all_ways(rank: int, paths: dict[str, str], shards: list[list[int]], ways: list[str]) -> dict[str, Any]:
    return {f"{name} {way}": one_way(rank, path, shards, way) for name, path in paths.items() for way in ways}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: random_model(name, tmp_path_factory.mktemp(name), **some) for name, some in FAMILIES.items()}


@pytest.fixture(scope="module")
def alone(paths: dict[str, str]) -> dict[str, Any]:
    (out,) = run_ranks(1, all_ways, paths, [list(range(len(batch())))], list(WAYS))
    return out


def assert_same_training(found: dict[str, Any], expected: dict[str, Any], metrics: list[dict[str, Any]]) -> None:
    merged, values = metric_values(merge_metrics(metrics)), metric_values(expected["metrics"])
    assert merged.keys() == values.keys()
    for name, value in values.items():
        assert merged[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for name, gradient in expected["gradients"].items():
        np.testing.assert_allclose(found["gradients"][name], gradient, atol=1e-5, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_every_layout_gives_the_padded_numbers(alone: dict[str, Any], family: str, way: str) -> None:
    expected, found = alone[f"{family} padded"], alone[f"{family} {way}"]
    assert found["report"].split(" ")[0] == way.split(",")[0], "no fallback"
    for name, values in expected["columns"].items():
        np.testing.assert_allclose(found["columns"][name], values, atol=1e-5, rtol=0, err_msg=name)
    assert_same_training(found, expected, [found["metrics"]])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_log_probs_are_those_of_transformers(alone: dict[str, Any], paths: dict[str, str], family: str) -> None:
    """One sequence after the other, and one expert after the other, without a group of matrix products for all."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        paths[family], dtype=torch.float32, experts_implementation="eager"
    )
    expected = torch.cat(log_probs_alone(model, batch(), TEMPERATURE))
    np.testing.assert_allclose(alone[f"{family} shared"]["columns"]["log_probs"], expected, atol=1e-5)
    assert expected.std() > 0.3, "there is something to compare"
    metrics = metric_values(alone[f"{family} padded"]["metrics"])
    assert metrics["actor/grad_norm"] > 1
    assert 0.05 < metrics["actor/off_policy_masked_fraction"] < 0.95


TWO_RANKS = ["padded, 3 rows at a time", "packed, 60 tokens at a time", "shared, 40 tokens at a time"]


@pytest.fixture(scope="module")
def pair(paths: dict[str, str]) -> list[dict[str, Any]]:
    shards = [[0, 1, 2, 5, 8, 13], [3, 4, 6, 7, 9, 10, 11, 12]]  # groups cut between ranks
    return run_ranks(2, all_ways, paths, shards, TWO_RANKS)


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", TWO_RANKS)
def test_two_ranks_give_the_same(alone: dict[str, Any], pair: list[dict[str, Any]], family: str, way: str) -> None:
    ranks = [rank[f"{family} {way}"] for rank in pair]
    for rank in ranks:
        assert_same_training(rank, alone[f"{family} padded"], [each["metrics"] for each in ranks])


# --- families with attention of their own -----------------------------------------------------------------------
RIGHT = "right"


def judged(rank: int, families: list[str], layouts: list[str]) -> list[list[str]]:
    return [judge(family, layouts) for family in families]


def test_sinks_own_attention_and_buffers_that_are_in_no_file() -> None:
    (found,) = run_ranks(1, judged, ["gpt_oss", "bloom", "falcon_h1"], ["padded", "shared"])
    sinks, own, buffers = found
    assert sinks == [RIGHT, RIGHT]
    assert own[0] == buffers[0] == RIGHT
    assert own[1].startswith("padded: ")
    assert "BloomAttention" in own[1]
    assert buffers[1].startswith("padded: ")


@pytest.mark.long
def test_families_of_each_kind() -> None:
    everywhere = ["gpt_oss", "mimo_v2_flash", "mistral", "gemma3_text", "deepseek_v3", "phi3", "opt", "qwen3_next"]
    padded = ["gptj", "falcon", "gemma2", "nemotron", "mamba", "zamba2", "hy_v4", "llama4_text", "qwen4_exp_text"]
    (found,) = run_ranks(1, judged, everywhere + padded, ["padded", "packed", "shared"])
    for family, cells in zip(everywhere, found, strict=False):
        assert cells == [RIGHT] * 3, family
    for family, cells in zip(padded, found[len(everywhere) :], strict=True):
        assert cells[0] == RIGHT, family
        assert all(cell.startswith("padded: ") for cell in cells[1:]), family
