"""What policies, critics, reward models and SFT train for: a step equals plain PyTorch, however it is cut."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid

from grpo_dist.algorithms import policy_objective
from grpo_dist.algorithms.settings import LabelSettings, PreferenceSettings, SFTSettings
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import fsdp_engine
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.objectives import Loss, PairObjective, read_metrics
from grpo_dist.protocol import DataProto, Ragged, merge_metrics, metric_values
from tests.engines.train.plain import assert_same, causal_lm, flat, response_logits, step, told, weights, with_sgd
from tests.messages import says
from tests.models import objective, random_batch, random_classifier
from tests.ranks import run_ranks
from tests.tiers import first
from tests.worker_settings import value_settings

KEY = "reward_model.model.path"
LR, CLIP, TEMPERATURE = 0.1, 0.4, 0.7
KINDS: dict[str, Any] = {
    "pairs": PreferenceSettings(),
    "labels": LabelSettings(),
    "values": value_settings(CLIP, "token-mean"),
    "values of sequences": value_settings(CLIP, "seq-mean-token-sum-norm", length=12.0),
    "conversations": SFTSettings(),
    "policy": objective(entropy_coeff=0.5),
}
HEADS = [kind for kind in KINDS if kind not in ("conversations", "policy")]


def engine(path: str, kind: str, layout: str = "shared", *, checkpointing: bool = False) -> FSDPEngine:
    head = {"num_labels": 1, "key": KEY} if kind in HEADS else {}
    temperature = TEMPERATURE if kind == "policy" else 1.0
    made = with_sgd(path, LR, temperature, layout=layout, enable_gradient_checkpointing=checkpointing, **head)
    made.grad_clip = 1.0 if kind == "policy" else made.grad_clip
    return made


# --- rows ------------------------------------------------------------------------------------------------------------
def pairs(number: int = 5) -> DataProto:
    """Of each pair the chosen row comes first in every second one; two pairs have the same prompt."""
    data = random_batch(num_groups=number - 1, n=2, seed=2)
    data = data.index([*range(len(data)), 0, 1]).select(("prompts", "responses"))
    labels = [[-1] * (int(n) - 1) + [(row + row // 2 + 1) % 2] for row, n in enumerate(data["responses"].lengths)]
    columns = {"labels": Ragged.from_rows(labels, torch.int8), **data.batch}
    columns["responses"] = Ragged(data["responses"].values.roll(1), data["responses"].offsets)
    return DataProto.from_dict(columns, {"uid": [f"pair {row // 2}" for row in range(len(labels))]})


def with_columns(data: DataProto, **columns: Ragged) -> DataProto:
    return DataProto({**data.batch, **columns}, data.non_tensor_batch)


def steps() -> DataProto:
    """Responses with labels on about half of their tokens."""
    data = random_batch(num_groups=4, n=2, seed=3).select(("prompts", "responses", "uid"))
    rng = np.random.default_rng(4)
    labels = [rng.integers(-1, 2, int(n)) for n in data["responses"].lengths]
    return with_columns(data, labels=Ragged.from_rows(labels, torch.int8))


def conversations() -> DataProto:
    """Eight rows, of which two each have the same prompt; about two thirds of the response tokens train."""
    data = random_batch(num_groups=4, n=2, seed=5).select(("prompts", "responses", "uid"))
    rng = np.random.default_rng(6)
    masks = [rng.random(int(length)) < 2 / 3 for length in data["responses"].lengths]
    return with_columns(data, response_mask=Ragged.from_rows([np.append(row[:-1], True) for row in masks], torch.int8))


def critic_rows(path: str) -> DataProto:
    """Old values are off the model's by more than the clip range; a row is masked whole, others have gaps."""
    data = random_batch(num_groups=4, n=2, seed=5)
    rng = np.random.default_rng(6)
    with torch.no_grad():
        found = [row[:, 0].numpy() for row in response_logits(classifier(path), data)]
    old = [row + rng.normal(scale=3 * CLIP, size=len(row)) for row in found]
    returns = [row + rng.normal(scale=CLIP, size=len(row)) for row in found]
    masks = [rng.random(len(row)) > 0.3 for row in found]
    masks[3][:] = False
    floats = {"values": Ragged.from_rows(old, torch.float32), "returns": Ragged.from_rows(returns, torch.float32)}
    return with_columns(data, response_mask=Ragged.from_rows(masks, torch.int8), **floats)


# --- in plain PyTorch ------------------------------------------------------------------------------------------------
def classifier(path: str) -> Any:
    config = transformers.AutoConfig.from_pretrained(path)
    config.token_classification_bias = False
    auto: Any = transformers.AutoModelForTokenClassification
    return auto.from_pretrained(path, config=config, dtype=torch.float32).eval()


def label_loss(model: Any, data: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
    """Rows of equal uid are pairs, if each has one label."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    values, wanted = [], []
    columns = (data[name].rows() for name in ("prompts", "responses", "labels"))
    for uid, prompt, response, labels in zip(data["uid"], *columns, strict=True):
        at_tokens = model(input_ids=torch.cat([prompt, response]).long()[None]).logits[0, len(prompt) :, 0]
        found.setdefault(uid, {})[int(labels[-1])] = at_tokens[-1]
        values.append(at_tokens[labels >= 0])
        wanted.append(labels[labels >= 0].float())
    metrics: dict[str, float] = {}
    if all(len(labelled) == 1 for labelled in wanted):
        margins = torch.stack([pair[1] - pair[0] for pair in found.values()])
        loss, right = -logsigmoid(margins).mean(), margins > 0
        metrics["margin"] = margins.mean().item()
    else:
        logits, targets = torch.cat(values), torch.cat(wanted)
        loss, right = binary_cross_entropy_with_logits(logits, targets), (logits > 0) == (targets > 0)
    return loss, metrics | {"loss": loss.item(), "accuracy": right.float().mean().item()}


def value_loss(model: Any, data: DataProto, *, sequences: bool) -> tuple[torch.Tensor, dict[str, float]]:
    """The sum over the tokens that train by their number, or by 12 and the sequences with one."""
    losses, clipped, seen = [], [], []
    columns = (data[name].rows() for name in ("values", "returns", "response_mask"))
    for logits, old, returns, mask in zip(response_logits(model, data), *columns, strict=True):
        row = logits[:, 0]
        near = old + (row - old).clamp(-CLIP, CLIP)
        errors = torch.stack([(row - returns) ** 2, (near - returns) ** 2])[:, mask > 0]
        losses.append(errors.max(0).values / 2)
        clipped.append(errors[1] > errors[0])
        seen.append(row.detach()[mask > 0])
    tokens = torch.cat(losses)
    loss = tokens.sum() / (12 * sum(len(row) > 0 for row in losses) if sequences else len(tokens))
    metrics = {"vf_loss": loss.item(), "vf_clipfrac": torch.cat(clipped).float().mean().item()}
    return loss, metrics | {"vpred_mean": torch.cat(seen).mean().item()}


def conversation_loss(model: Any, data: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
    mask = data["response_mask"].values.bool()
    loss = cross_entropy(torch.cat(response_logits(model, data))[mask], data["responses"].values[mask].long())
    return loss, {"loss": loss.item()}


def policy_loss(model: Any, data: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
    padded = torch.nn.utils.rnn.pad_sequence
    scaled = [torch.log_softmax(logits / TEMPERATURE, -1) for logits in response_logits(model, data)]
    pairs = zip(scaled, data["responses"].rows(), strict=True)
    columns = {name: data[name].to_padded(0.0) for name in ("old_log_probs", "advantages", "ref_log_probs")}
    columns["response_mask"] = data["response_mask"].to_padded(0).float()
    columns["log_probs"] = padded([row.gather(-1, ids.long()[:, None])[:, 0] for row, ids in pairs], True)
    columns["entropy"] = padded([-(row.exp() * row).sum(-1) for row in scaled], True)
    counts = {"global_tokens": columns["response_mask"].sum(), "global_sequences": float(len(data))}
    loss, metrics = policy_objective(columns, KINDS["policy"], **counts)
    found = {name.removeprefix("actor/"): float(value) for name, value in metrics.items()}
    return loss, found | {"loss": loss.item()}


def loss_of(kind: str, model: Any, data: DataProto) -> tuple[str, tuple[torch.Tensor, dict[str, float]]]:
    if kind.startswith("values"):
        return "critic", value_loss(model, data, sequences=kind.endswith("sequences"))
    if kind in HEADS:
        return "reward_model", label_loss(model, data)
    return ("actor", policy_loss(model, data)) if kind == "policy" else ("sft", conversation_loss(model, data))


@torch.enable_grad()
def plain_step(path: str, data: DataProto, kind: str) -> dict[str, Any]:
    model = classifier(path) if kind in HEADS else causal_lm(path)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    role, (loss, metrics) = loss_of(kind, model, data)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 if kind == "policy" else float("inf")).item()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    metrics |= {"grad_norm": norm, "lr": LR, "skipped_updates": 0.0}
    after = {name: weight.detach() for name, weight in model.named_parameters()}
    return {
        "metrics": {f"{role}/{name}": value for name, value in metrics.items()},
        "weights": {name: weight.numpy() for name, weight in after.items()},
        "moved": min((after[name] - weight).abs().max().item() for name, weight in before.items()),
    }


# --- steps -----------------------------------------------------------------------------------------------------------
TWO_RANKS = ([*range(6), 8, 9], [6, 7])
# Ranks' rows, of which pairs have ten and the others eight, the layout, the limits of a pass.
CUTS: dict[str, tuple[Sequence[Sequence[int]], str, PassLimits]] = {
    "padded, one pass": ([range(99)], "padded", PassLimits("", 99)),
    "packed, one pass": ([range(99)], "packed", PassLimits("", 99)),
    "shared, one pass": ([range(99)], "shared", PassLimits("", 99)),
    "shared, passes of one sequence or pair": ([range(99)], "shared", PassLimits("", 1)),
    "packed, passes of 25 tokens": ([range(99)], "packed", PassLimits("", 1, 25)),
    "shared, checkpointing": ([range(99)], "shared", PassLimits("", 4)),
    "two ranks, shared": (TWO_RANKS, "shared", PassLimits("", 3)),
    "two ranks, packed": (TWO_RANKS, "packed", PassLimits("", 2)),
    "two ranks, padded, checkpointing": (TWO_RANKS, "padded", PassLimits("", 4)),
    "two ranks, one without rows": ([range(99), []], "shared", PassLimits("", 4)),
}
FIRST = ["shared, one pass", "packed, passes of 25 tokens", "two ranks, padded, checkpointing"]
FIRST += ["two ranks, one without rows"]


def read_detached(losses: Sequence[Loss]) -> Any:
    held = [value for loss in losses for value in (loss.loss, *loss.sums.values(), *loss.means.values())]
    assert not any(value.requires_grad for value in held), "the graphs of all passes would live until here"
    return read_metrics(losses)


def train(rank: int, paths: dict[str, str], rows: dict[str, DataProto], cut: str) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    fsdp_engine.read_metrics = read_detached
    shards, layout, limits = CUTS[cut]
    for kind, settings in KINDS.items():
        made = engine(paths[kind], kind, layout, checkpointing="checkpointing" in cut)
        own = rows[kind].index([row for row in shards[rank] if row < len(rows[kind])])
        result = made.train_mini_batch(own, settings, limits)
        out[kind] = {"metrics": result.metrics, "weights": weights(made), "report": made.forward.report}
        out[kind]["log_probs"] = result.log_probs
    return out


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, random_models: dict[str, str]) -> dict[str, str]:
    path = random_classifier(tmp_path_factory.mktemp("classifier"))
    return {kind: path if kind in HEADS else random_models["tied"] for kind in KINDS}


@pytest.fixture(scope="module")
def rows(paths: dict[str, str]) -> dict[str, DataProto]:
    values = critic_rows(paths["values"])
    made = (pairs(), steps(), values, values, conversations(), random_batch(num_groups=4, n=2, seed=5))
    return dict(zip(KINDS, made, strict=True))


@pytest.fixture(scope="module")
def runs(paths: dict[str, str], rows: dict[str, DataProto]) -> Callable[[str], list[dict[str, Any]]]:
    return functools.cache(lambda cut: run_ranks(len(CUTS[cut][0]), train, paths, rows, cut))


@pytest.fixture(scope="module")
def expected(paths: dict[str, str], rows: dict[str, DataProto]) -> dict[str, Any]:
    return {kind: plain_step(paths[kind], rows[kind], kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", first(CUTS, *FIRST))
def test_a_step_equals_plain_pytorch(runs: Any, expected: dict[str, Any], kind: str, cut: str) -> None:
    ranks = [rank[kind] for rank in runs(cut)]
    metrics = metric_values(merge_metrics([rank["metrics"] for rank in ranks]))
    assert metrics == pytest.approx(expected[kind]["metrics"], rel=5e-5, abs=1e-6)
    for rank in ranks:
        assert rank["log_probs"] is None
        assert_same(rank["weights"], expected[kind]["weights"], rtol=1e-4, atol=1e-5)
        assert ("values" in rank["report"]) == (kind in HEADS)
        assert CUTS[cut][1][:4] in rank["report"], "in the layout that was asked for"
        assert "instead" not in rank["report"]


def test_the_steps_prove_something(expected: dict[str, Any]) -> None:
    """Every weight moves, and of each kind with a head to another place; shares are neither 0 nor 1."""
    assert min(step["moved"] for step in expected.values()) > 1e-5
    heads = [expected[kind]["weights"]["score.weight"] for kind in HEADS]
    assert min(np.abs(one - other).max() for i, one in enumerate(heads) for other in heads[:i]) > 1e-3
    metrics = [item for step in expected.values() for item in step["metrics"].items()]
    assert all(0.1 < value < 0.9 for name, value in metrics if name.endswith(("accuracy", "clipfrac")))
    assert expected["policy"]["metrics"]["actor/grad_norm"] > 1.0, "clipping is at work"


def odd_steps(rank: int, path: str, data: DataProto) -> None:
    """Three steps; then data that cannot be trained on."""
    made, settings, limits = engine(path, "values"), KINDS["values"], PassLimits("", 8)
    found = made.compute_columns(data, ("values",), limits)["values"]
    before = flat(made)
    for old, target, mask in ((-10.0, 1.0, 1), (10.0, -1.0, 1), (0.0, 1.0, 0)):
        numbers = {"values": found.values + old, "returns": found.values + target}
        numbers["response_mask"] = torch.full_like(data["response_mask"].values, mask)
        columns = {column: Ragged(values, found.offsets) for column, values in numbers.items()}
        metrics = step(made, with_columns(data, **columns), 8, settings)
        assert metrics["critic/vf_loss"] == pytest.approx(mask * 10.6**2 / 2, rel=1e-4)
        assert metrics["critic/grad_norm"] == 0
        assert metrics["critic/skipped_updates"] == 1 - mask
        assert metrics.get("critic/vf_clipfrac") == (1 if mask else None), "a mean over no tokens is no metric"
        assert ("critic/vpred_mean" in metrics) == mask
    np.testing.assert_array_equal(flat(made), before)
    bad = with_columns(data, returns=Ragged(torch.full_like(found.values, float("inf")), found.offsets))
    says(told(made.train_mini_batch, bad, settings, limits), "TrainingDiverged", "loss inf", "p0", "not taken")
    without = data.select([name for name in data.columns() if name != "returns"])
    says(told(made.train_mini_batch, without, settings, limits), "BatchError", "'returns'")


def test_steps_of_a_critic_worked_out_on_paper(paths: dict[str, str], rows: dict[str, DataProto]) -> None:
    """Values 10 away from the old ones, on the side of their returns 1 further on: the error that counts is of
    10 - 0.4 + 1, and it has no gradient. Without a token that trains no step is taken.
    """
    run_ranks(1, odd_steps, paths["values"], rows["values"])


# --- what is refused -------------------------------------------------------------------------------------------------
def test_what_is_no_pair_is_named() -> None:
    check = object.__new__(PairObjective)
    good = check.prepared(pairs(3))
    assert check.counts(good) == [3.0]
    for rows in ([0], [0, 1, 2], [0, 0], [0, 1, 0, 1]):
        says(told(check.counts, good.index(rows)), "BatchError", f"uid pair {rows[-1] // 2}")
    labels = Ragged.from_rows([torch.full_like(row, 0) for row in pairs(3)["labels"].rows()], torch.int8)
    says(told(check.counts, check.prepared(with_columns(pairs(3), labels=labels))), "BatchError", "uid pair 0")


def pairs_one_at_a_time(rank: int, path: str) -> str:
    made = engine(path, "pairs")
    made.forward.layout, made.forward.report = "alone", "one sequence at a time"
    return told(made.train_mini_batch, pairs(3), PreferenceSettings(), PassLimits("", 4))


def test_a_model_that_sees_other_sequences_takes_no_pairs(paths: dict[str, str]) -> None:
    (message,) = run_ranks(1, pairs_one_at_a_time, paths["pairs"])
    says(message, f"{KEY}={paths['pairs']}", "pair")
