"""Reward models trained on pairs and on labelled tokens: a step equals one in plain PyTorch, however it is cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from grpo_dist.algorithms.settings import LabelSettings, PreferenceSettings
from grpo_dist.assets import resolve_model_path
from grpo_dist.config.schema_roles import AdamWConfig
from grpo_dist.data import load_tokenizer
from grpo_dist.data.step_tokens import StepForm
from grpo_dist.data.training_rows import Pair, training_batch
from grpo_dist.data.training_tokens import tokenize_preferences
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.forward import PolicyForward
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.objectives import PairObjective
from grpo_dist.errors import BatchError, ConfigError
from grpo_dist.protocol import DataProto, Ragged, merge_metrics, metric_values
from grpo_dist.protocol.sequences import with_score_token
from grpo_dist.tasks import arithmetic
from tests.messages import refuses, says
from tests.models import random_batch, random_classifier, scheduled
from tests.ranks import run_ranks
from tests.worker_settings import model_settings

KEY = "reward_model.model.path"
LR = 0.1


def engine(path: str, layout: str = "shared", *, checkpointing: bool = False) -> FSDPEngine:
    """Plain SGD: Adam divides by the size of the gradient, which turns rounding of small ones into real steps."""
    model = model_settings(path, enable_gradient_checkpointing=checkpointing, layout=layout, num_labels=1, key=KEY)
    optimizer = AdamWConfig(lr=LR, weight_decay=0.0, betas=(0.9, 0.999), override_optimizer_config=None)
    made = FSDPEngine(model, device="cpu", temperature=1.0, optimizer=optimizer)
    made.optimizer = torch.optim.SGD(made.model.parameters(), lr=LR)
    return made


def pairs(number: int = 5) -> DataProto:
    """Of each pair the chosen row comes first in every second one; two pairs have the same prompt."""
    data = random_batch(num_groups=number - 1, n=2, seed=2)
    data = data.index([*range(len(data)), 0, 1]).select(("prompts", "responses"))
    labels = [[-1] * (int(n) - 1) + [(row + row // 2 + 1) % 2] for row, n in enumerate(data["responses"].lengths)]
    columns = {"labels": Ragged.from_rows(labels, torch.int8), **data.batch}
    columns["responses"] = Ragged(data["responses"].values.roll(1), data["responses"].offsets)
    return DataProto.from_dict(columns, {"uid": [f"pair {row // 2}" for row in range(len(labels))]})


def steps() -> DataProto:
    """Responses with labels on about half of their tokens."""
    data = random_batch(num_groups=4, n=2, seed=3).select(("prompts", "responses", "uid"))
    rng = np.random.default_rng(4)
    labels = [rng.integers(-1, 2, int(n)) for n in data["responses"].lengths]
    return DataProto({**data.batch, "labels": Ragged.from_rows(labels, torch.int8)}, data.non_tensor_batch)


def plain_model(path: str) -> Any:
    config = transformers.AutoConfig.from_pretrained(path)
    config.token_classification_bias = False
    auto: Any = transformers.AutoModelForTokenClassification
    return auto.from_pretrained(path, config=config, dtype=torch.float32).eval()


def plain_step(path: str, data: DataProto) -> dict[str, Any]:
    """One step of SGD in plain PyTorch, each sequence alone. Rows of equal uid are pairs, if each has one label."""
    model: Any = plain_model(path)
    found: dict[str, dict[int, torch.Tensor]] = {}
    values, wanted = [], []
    for uid, prompt, response, labels in zip(data["uid"], *(data[n].rows() for n in ROW_COLUMNS), strict=True):
        ids = torch.cat([prompt, response]).long()
        at_tokens = model(input_ids=ids[None]).logits[0, len(prompt) :, 0]
        found.setdefault(uid, {})[int(labels[-1])] = at_tokens[-1]
        values.append(at_tokens[labels >= 0])
        wanted.append(labels[labels >= 0].float())
    if all(len(labelled) == 1 for labelled in wanted):
        margins = torch.stack([pair[1] - pair[0] for pair in found.values()])
        loss, right = -logsigmoid(margins).mean(), margins > 0
        told = {"reward_model/margin": margins.mean().item()}
    else:
        logits, targets = torch.cat(values), torch.cat(wanted)
        loss, right, told = binary_cross_entropy_with_logits(logits, targets), (logits > 0) == (targets > 0), {}
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    metrics = {"loss": loss.item(), "accuracy": right.float().mean().item(), "grad_norm": norm, "lr": LR}
    return {
        "metrics": told | {f"reward_model/{name}": value for name, value in metrics.items()},
        "weights": {name: weight.detach().numpy() for name, weight in model.named_parameters()},
    }


ROW_COLUMNS = ("prompts", "responses", "labels")
KINDS: dict[str, tuple[Any, DataProto]] = {
    "pairs": (PreferenceSettings(), pairs()),
    "labels": (LabelSettings(), steps()),
}
# ranks' rows, layout, and limits of a pass
PAIRS_OF_RANKS = ([*range(6), 8, 9], [6, 7])
CUTS: dict[str, tuple[Sequence[Sequence[int]], str, dict[str, Any]]] = {
    "padded, one pass": ([range(99)], "padded", {"limits": PassLimits("", 99)}),
    "packed, one pass": ([range(99)], "packed", {"limits": PassLimits("", 99)}),
    "shared, one pass": ([range(99)], "shared", {"limits": PassLimits("", 99)}),
    "shared, passes of one sequence or pair": ([range(99)], "shared", {"limits": PassLimits("", 1)}),
    "packed, passes of 25 tokens": ([range(99)], "packed", {"limits": PassLimits("", 1, 25)}),
    "shared, checkpointing": ([range(99)], "shared", {"limits": PassLimits("", 4), "checkpointing": True}),
    "two ranks, shared": (PAIRS_OF_RANKS, "shared", {"limits": PassLimits("", 3)}),
    "two ranks, packed": (PAIRS_OF_RANKS, "packed", {"limits": PassLimits("", 2)}),
    "two ranks, padded, recomputed": (PAIRS_OF_RANKS, "padded", {"limits": PassLimits("", 4), "checkpointing": True}),
    "two ranks, one without rows": ([range(99), []], "shared", {"limits": PassLimits("", 4)}),
}


def own_rows(data: DataProto, shards: Sequence[Sequence[int]], rank: int) -> DataProto:
    return data.index([row for row in shards[rank] if row < len(data)])


def train(rank: int, path: str, cuts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """One step of each kind in each cut."""
    out: dict[str, dict[str, Any]] = {}
    for cut, (shards, layout, limits) in cuts.items():
        limits = dict(limits)
        checkpointing = limits.pop("checkpointing", False)
        for kind, (objective, data) in KINDS.items():
            made = engine(path, layout, checkpointing=checkpointing)
            result = made.train_mini_batch(own_rows(data, shards, rank), objective=objective, **limits)
            out[f"{kind}, {cut}"] = {
                "metrics": result.metrics,
                "weights": {name: tensor.numpy().copy() for name, tensor in made.full_parameters("float32")},
                "report": made.forward.report,
                "log_probs": result.log_probs,
            }
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def runs(path: str) -> dict[str, list[dict[str, Any]]]:
    """By kind and cut: what each rank has."""
    found: dict[str, list[dict[str, Any]]] = {}
    for size in (1, 2):
        ranks = run_ranks(size, train, path, {name: cut for name, cut in CUTS.items() if len(cut[0]) == size})
        found |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return found


@pytest.fixture(scope="module")
def expected(path: str) -> dict[str, Any]:
    with torch.enable_grad():
        return {kind: plain_step(path, data) for kind, (_, data) in KINDS.items()}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("cut", list(CUTS))
def test_a_step_equals_plain_pytorch(runs: dict[str, Any], expected: dict[str, Any], kind: str, cut: str) -> None:
    ranks = runs[f"{kind}, {cut}"]
    metrics = metric_values(merge_metrics([rank["metrics"] for rank in ranks]))
    wanted = expected[kind]["metrics"] | {"reward_model/skipped_updates": 0.0}
    assert metrics.keys() == wanted.keys()
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(value, rel=5e-5, abs=1e-6), name
    for rank in ranks:
        assert rank["log_probs"] is None
        for name, weight in expected[kind]["weights"].items():
            np.testing.assert_allclose(rank["weights"][name], weight, rtol=1e-4, atol=1e-5, err_msg=name)
        says(rank["report"], "values")
        assert CUTS[cut][1][:4] in rank["report"], "in the layout that was asked for"
        assert "instead" not in rank["report"]


def test_the_steps_prove_something(expected: dict[str, Any], path: str) -> None:
    """Accuracies are between 0 and 1; the steps differ between the kinds, and every weight moves."""
    before = dict(plain_model(path).named_parameters())
    for step in expected.values():
        assert 0 < step["metrics"]["reward_model/accuracy"] < 1
        for name, weight in step["weights"].items():
            assert np.abs(weight - before[name].detach().numpy()).max() > 1e-5, name
    one, other = (step["weights"]["score.weight"] for step in expected.values())
    assert np.abs(one - other).max() > 1e-3


def test_what_is_no_pair_is_named() -> None:
    check = object.__new__(PairObjective)
    good = check.prepared(pairs(3))
    assert check.counts(good) == [3.0]
    for rows in ([0], [0, 1, 2], [0, 0], [0, 1, 0, 1]):
        with refuses(BatchError, f"uid pair {rows[-1] // 2}"):
            check.counts(good.index(rows))
    labels = [torch.full_like(row, 0) for row in pairs(3)["labels"].rows()]
    columns = pairs(3).batch | {"labels": Ragged.from_rows(labels, torch.int8)}
    with refuses(BatchError, "uid pair 0"):
        check.counts(check.prepared(DataProto(columns, pairs(3).non_tensor_batch)))


def pairs_one_at_a_time(rank: int, path: str) -> str:
    made = engine(path)
    made.forward.layout, made.forward.report = "alone", "one sequence at a time"
    try:
        made.train_mini_batch(pairs(3), PreferenceSettings(), PassLimits("", 4))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_model_that_sees_other_sequences_takes_no_pairs(path: str) -> None:
    (message,) = run_ranks(1, pairs_one_at_a_time, path)
    says(message, f"{KEY}={path}", "pair")


def test_the_policy_is_no_reward_model() -> None:
    with pytest.raises(AssertionError):
        PairObjective(PreferenceSettings(), object.__new__(PolicyForward), None)


# --- the built-in task ---------------------------------------------------------------------------------------------
def sums(number: int) -> list[Pair]:
    """Questions of the built-in task, each with its sum and with another number of that range."""
    rng = random.Random(0)
    found = []
    for i, row in enumerate(arithmetic.rows("train")[:number]):
        right = int(row["reward_model"]["ground_truth"])
        wrong = rng.choice([n for n in range(200, 1999) if n != right])
        answers = [[{"role": "assistant", "content": f"#### {n}"}] for n in (right, wrong)]
        found.append(Pair(f"row {i}", row["prompt"], *answers))
    return found


def learn_sums(rank: int, path: str) -> list[float]:
    """Accuracies on 200 pairs that are not trained on, before and after 30 steps of 32 pairs."""
    tokenizer = load_tokenizer(path, trust_remote_code=False)
    examples, _ = tokenize_preferences(sums(1160), tokenizer, max_length=100, padding_id=None, form=StepForm())
    model = model_settings(path, num_labels=1, new_head_seed=0)
    optimizer = scheduled(lr=2e-3, betas=(0.9, 0.99), warmup=10, lr_scheduler_type="constant", min_lr_ratio=0.0)
    made = FSDPEngine(model, device="cpu", temperature=1.0, optimizer=optimizer, total_steps=30, grad_clip=1.0)

    def accuracy() -> float:
        held_out = with_score_token(training_batch(examples[:200], "labels"))
        rows = made.compute_columns(held_out, ("values",), PassLimits("", 100))["values"].rows()
        return float(np.mean([good[-1] > bad[-1] for good, bad in zip(rows[0::2], rows[1::2], strict=True)]))

    before = accuracy()
    for start in range(200, 1160, 32):
        batch = training_batch(examples[start : start + 32], "labels")
        made.train_mini_batch(batch, PreferenceSettings(), PassLimits("", 64))
    return [before, accuracy()]


@pytest.mark.deep
def test_the_built_in_model_learns_to_prefer_right_sums() -> None:
    """Chance is 0.5, with a standard deviation of 0.035 over 200 pairs."""
    ((before, after),) = run_ranks(1, learn_sums, resolve_model_path("builtin:tiny-qwen3"))
    assert 0.35 < before < 0.65
    assert after > 0.68
