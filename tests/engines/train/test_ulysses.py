"""Sequences that are split over ranks: log-probs, losses and gradients are those of one rank."""

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers

from grpo_dist.algorithms.settings import TrainingSettings
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import attention, model_loading
from grpo_dist.engines.train.attention import check_split
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.ulysses import SequenceGroup
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto, Ragged, merge_metrics, metric_values
from tests.engines.train.plain import assert_same, built, log_probs, told, weights, with_sgd
from tests.equivalence.test_layout import batch
from tests.messages import refuses, says
from tests.models import EXPERTS, objective, random_classifier, random_model, without_memory
from tests.ranks import LIMIT_S, run_ranks
from tests.worker_settings import lora, model_settings, value_settings

KEY = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
ROWS = list(range(16))
VALUES = value_settings(0.4, "seq-mean-token-mean")
EXACT = objective(kl_loss_type="full", entropy_coeff=0.1, loss_agg_mode="seq-mean-token-mean")
SEQUENCES = objective(loss_mode="gspo", weighted=True, kl_loss_type="unbiased_k3", off_policy_threshold=1.0)
PACKED = {"lora": lora(), "layout": "packed", "enable_gradient_checkpointing": True}
# Of each case: the model, its settings, and the objective; what differs is taken in turns.
CASES: dict[str, tuple[str, dict[str, Any], TrainingSettings]] = {
    "exact KL and entropy": ("Qwen3", {}, EXACT),
    "LoRA, packed, checkpointing": ("Qwen3", PACKED, SEQUENCES),
    "experts": ("Qwen3Moe", {}, objective(entropy_coeff=0.0)),
    "logits of the model's own code": ("Cohere", {}, objective(entropy_coeff=0.1, loss_agg_mode="token-sum")),
    "critic": ("critic", {"num_labels": 1}, VALUES),
}
# Ranks, ranks of a group, rows of each group, sequences of a pass, ranks of a copy of the weights.
SPLITS: dict[str, tuple[int, int, list[list[int]], int, int]] = {
    "1 rank": (1, 1, [ROWS], 16, -1),
    "2 ranks": (2, 2, [ROWS], 16, -1),
    "4 ranks": (4, 4, [ROWS], 5, -1),
    "2 x 2 ranks, uneven": (4, 2, [ROWS[:13], ROWS[13:]], 3, 2),
    "2 x 2 ranks, one without rows": (4, 2, [ROWS, []], 16, -1),
}


def engine(path: str, size: int = 1, **changes: Any) -> FSDPEngine:
    """With plain SGD of rate 1, so that the weights after a step are those before less the gradient."""
    return with_sgd(path, 1.0, temperature=0.7, sequence_parallel_size=size, **changes)


def rows() -> DataProto:
    data, noise = batch(), np.random.default_rng(7)
    lengths = data["responses"].lengths.tolist()
    made = {name: [noise.normal(size=length) for length in lengths] for name in ("values", "returns")}
    return data.union(DataProto.from_dict({k: Ragged.from_rows(v, torch.float32) for k, v in made.items()}))


def train(rank: int, paths: dict[str, str], split: tuple[int, int, list[list[int]], int, int]) -> dict[str, Any]:
    _, size, groups, sequences, copy = split
    own, limits = rows().index(groups[rank // size]), PassLimits("", sequences)
    out: dict[str, Any] = {}
    for name, (family, changes, settings) in CASES.items():
        made = engine(paths[family], size, fsdp_size=copy, **changes)
        columns: tuple[str, ...] = ("values",) if family == "critic" else ("log_probs", "entropies")
        if family.startswith("Qwen3"):  # whose logits are hidden states times output layer
            made.reference_head = made.output_layer("cpu")
            columns = (*columns, "hidden_states")
        found = made.compute_columns(own, columns, limits)
        out[name] = {
            "columns": {column: ragged.values.numpy().copy() for column, ragged in found.items()},
            "metrics": made.train_mini_batch(own, settings, limits).metrics,
            "weights": weights(made),
            "evaluated": made.evaluate(own, settings, limits),
            "report": made.forward.report,
        }
    return out | {"bf16": log_probs(engine(paths["Qwen3"], size, compute_dtype="bf16"), own, sequences)}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp
    return {
        "Qwen3": random_model("Qwen3", folder("Qwen3"), head_dim=8),
        "Qwen3Moe": random_model("Qwen3Moe", folder("Qwen3Moe"), head_dim=8, **EXPERTS),
        "Cohere": random_model("Cohere", folder("Cohere"), logit_scale=0.5),
        "critic": random_classifier(folder("critic")),
    }


@pytest.fixture(scope="module")
def runs(paths: dict[str, str]) -> Callable[[str], list[dict[str, Any]]]:
    """What the ranks of a split have found; run when it is first asked for."""
    return functools.cache(lambda split: run_ranks(SPLITS[split][0], train, paths, SPLITS[split]))


OTHERS = [
    pytest.param("2 ranks", marks=pytest.mark.long),
    pytest.param("4 ranks", marks=pytest.mark.deep),
    "2 x 2 ranks, uneven",
    pytest.param("2 x 2 ranks, one without rows", marks=pytest.mark.long),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("split", OTHERS)
def test_ranks_of_a_group_have_what_one_rank_has(runs: Any, split: str, case: str) -> None:
    (alone,), ranks = runs("1 rank"), runs(split)
    plain, size, groups = alone[case], *SPLITS[split][1:3]
    (norm,) = [value for name, value in metric_values(plain["metrics"]).items() if name.endswith("grad_norm")]
    assert norm > 1e-2, "the weights have moved: the comparison of gradients shows something"
    for kind in ("metrics", "evaluated"):
        merged = metric_values(merge_metrics([found[case][kind] for found in ranks[::size]]))
        assert merged == pytest.approx(metric_values(plain[kind]), rel=1e-4, abs=1e-5)
    lengths = rows()["responses"].lengths.tolist()
    for rank, found in enumerate(ranks):
        assert_same(found[case]["weights"], plain["weights"], rtol=1e-4, atol=2e-5)
        own = [sum(lengths[:row]) + i for row in groups[rank // size] for i in range(lengths[row])]
        for name, values in found[case]["columns"].items():
            expected = plain["columns"][name][own]
            np.testing.assert_allclose(values, expected.reshape(values.shape), atol=3e-5, err_msg=name)
        assert found[case]["report"].startswith("packed" if "packed" in case else "shared"), found[case]["report"]
        assert f"split over {size} ranks" in found[case]["report"]
        difference = np.abs(found["bf16"] - alone["bf16"][own])
        assert not own or difference.mean() < 0.05, "other sums round otherwise"


# --- parts -----------------------------------------------------------------------------------------------------------
def parts(rank: int) -> dict[str, Any]:
    group = SequenceGroup(2)
    ranks: Any = group.group
    x = torch.arange(8.0).view(1, 4, 2, 1) + 10 * rank  # 4 heads, 2 tokens of this rank
    x.requires_grad_()
    heads = group.heads(x)
    (heads * (1 + torch.arange(8.0).view(1, 2, 4, 1) + 100 * rank)).sum().backward()
    numbers, predictors = group.own(torch.tensor([0, 4, 9, 5, 6]), 4)
    values = torch.tensor([[5.0], [7.0]], requires_grad=True)
    whole = group.whole(values * (1 + rank), torch.tensor([2 * rank, 1]) if rank else torch.tensor([0, 2]), 4)
    whole.sum().backward()
    tensors = {"heads": heads, "gradient": x.grad, "own": numbers, "predictors": predictors, "values": values.grad}
    tensors["few"] = group.heads(torch.tensor([1.0, 2.0]).view(1, 1, 2, 1) + 10 * rank)
    tensors["part"] = group.part(torch.arange(4).view(1, 4))
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()} | {
        "back": group.exchange(heads.transpose(1, 2)).transpose(1, 2).equal(x),
        "limit": ranks._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
    }


def test_what_the_ranks_exchange() -> None:
    """By hand: two ranks, four heads, four tokens."""
    for found, expected in zip(run_ranks(2, parts), EXCHANGED, strict=True):
        # a head that is alone goes to both; ranks wait as long as all ranks do
        assert found == expected | {"few": [1, 2, 11, 12], "back": True, "limit": LIMIT_S}


EXCHANGED = [
    {
        "heads": [0, 1, 10, 11, 2, 3, 12, 13],  # heads 0 and 1 of tokens 0 and 1, then of 2 and 3
        "gradient": [1, 2, 5, 6, 101, 102, 105, 106],  # of each head from the rank that has it
        "part": [0, 1],
        "own": [0, 1, 2, 3],  # of two rows of four tokens, and one more
        "predictors": [0, 2, 5, 3],
        "values": [1, 1],  # of its own tokens only
    },
    {
        "heads": [4, 5, 14, 15, 6, 7, 16, 17],
        "gradient": [3, 4, 7, 8, 103, 104, 107, 108],
        "part": [2, 3],
        "own": [4],
        "predictors": [2],
        "values": [2, 2],
    },
]


# --- kernels of GPUs -------------------------------------------------------------------------------------------------
def by_flex(rank: int, path: str, size: int) -> list[float]:
    """Log-probs by FlexAttention, which on CPU goes forward only."""
    on_cpu = attention.attention_implementation
    model_loading.attention_implementation = lambda model, layout, device: on_cpu(model, layout, "cuda")
    made = built(path, temperature=0.7, sequence_parallel_size=size)
    assert made.model.config._attn_implementation == attention.FLEX
    return log_probs(made, rows(), 16).tolist()


@pytest.mark.deep
def test_flex_attention_over_a_share_of_the_heads(runs: Any, paths: dict[str, str]) -> None:
    expected = runs("1 rank")[0]["experts"]["columns"]["log_probs"]
    for found in run_ranks(2, by_flex, paths["Qwen3Moe"], 2):
        np.testing.assert_allclose(found, expected, atol=3e-5)


def test_flash_attention_gets_the_lengths_of_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own function is called with what transformers needs for whole rows, and without the positions of a slice."""
    group = Mock(heads=lambda x: torch.cat([x, x], 2), exchange=lambda x: x[:, :2])
    attend = Mock(side_effect=lambda module, query, *args, **options: (query.transpose(1, 2), None))
    registered: dict[str, Any] = {}
    monkeypatch.setattr(attention, "flash_attention_forward", attend)
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(attention.AttentionInterface, "register", registered.__setitem__)
    model = without_memory(transformers.Qwen3Config(num_hidden_layers=1))
    assert attention.attention_implementation(model, "packed", "cuda") == attention.FLASH
    x, positions = torch.ones(1, 2, 2, 1), torch.tensor([[0, 1, 2, 0]])
    lengths, kernel = attention.varlen_inputs(positions), registered[attention.FLASH]
    out, _ = kernel(None, x, x, x, None, sequence_group=group, position_ids=positions[:, 2:], **lengths)
    assert (out.shape, attend.call_args.args[1].shape[2]) == ((1, 2, 2, 1), 4)
    assert attend.call_args.kwargs.keys() == lengths.keys()
    assert attend.call_args.kwargs["cu_seq_lens_q"].tolist() == [0, 3, 4]
    kernel(None, x, x, x, None, position_ids=positions)
    assert attend.call_args.kwargs["position_ids"] is positions, "untouched where nothing is split"


# --- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [(4, 2, 1), (4, 2, 2), (4, 2, 4), (6, 6, 3), (4, 1, 2)])
def test_heads_that_split(sizes: tuple[int, int, int]) -> None:
    heads, kv_heads, size = sizes
    config = transformers.Qwen3Config(num_attention_heads=heads, num_key_value_heads=kv_heads)
    check_split(config, model_settings("a/model", sequence_parallel_size=size))


@pytest.mark.parametrize("sizes", [(4, 2, 3, "1 or 2 or 4"), (12, 4, 6, "1 or 2 or 4 or 12"), (4, 4, 8, "4")])
def test_heads_that_do_not_split(sizes: tuple[int, int, int, str]) -> None:
    heads, kv_heads, size, fitting = sizes
    config = transformers.Qwen3Config(num_attention_heads=heads, num_key_value_heads=kv_heads)
    with refuses(ConfigError, f"{KEY}={size}", "actor_rollout_ref.model.path=a/model", heads, kv_heads, fitting):
        check_split(config, model_settings("a/model", sequence_parallel_size=size))


def test_models_that_take_padded_sequences_only_and_hybrids_are_not_split() -> None:
    one, two = (model_settings("a/model", sequence_parallel_size=size) for size in (1, 2))
    check_split(transformers.MambaConfig(), one, "linear_attention")  # which has no heads to speak of
    for config, padded in ((transformers.Qwen3Config(), "linear_attention"), (transformers.Qwen3_5TextConfig(), "")):
        says(told(check_split, config, two, padded), "ConfigError", f"{KEY}=2", "a/model", "linear_attention", "1")


def without_exchange(rank: int, path: str) -> list[str]:
    """A model whose attention never comes by the exchange, as one with attention code of its own."""
    attention.over_heads = lambda attend: lambda *args, sequence_group=None, **options: attend(*args, **options)
    made = engine(path, 2)
    return [told(made.compute_log_probs, rows(), PassLimits("", 8)) for _ in range(2)]


def test_a_model_that_attends_by_code_of_its_own_is_refused(paths: dict[str, str]) -> None:
    for found in run_ranks(2, without_exchange, paths["Qwen3"]):
        for message in found:
            says(message, "ConfigError", f"{KEY}=2", paths["Qwen3"], "1")
