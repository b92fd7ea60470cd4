"""Engines: frozen, without a finite loss or a token that trains, as a moving reference, with passes in float16."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import loss_scale
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.loss_scale import START, LossScale
from grpo_dist.engines.train.sharded_tensors import whole
from grpo_dist.protocol import DataProto, Ragged
from tests.engines.train.plain import (
    assert_same,
    built,
    flat,
    log_probs,
    one_by_one,
    own_rows,
    save,
    step,
    told,
    weights,
    with_sgd,
)
from tests.messages import says
from tests.models import objective, random_batch, random_classifier, scheduled, trainable_engine
from tests.ranks import run_ranks
from tests.tiers import first
from tests.worker_settings import value_settings

TEMPERATURE = 0.7


def frozen(rank: int, path: str) -> None:
    full, half = (built(path, temperature=TEMPERATURE, compute_dtype=dtype) for dtype in ("fp32", "bf16"))
    sharded = [isinstance(each.model, FSDPModule) for each in (full, half, trainable_engine(path))]
    assert sharded == [False, True, True], "FSDP2 would hold its weights twice; it casts those of another type"
    assert [name for name, p in full.model.named_parameters() if p.requires_grad] == []
    expected = one_by_one(path, random_batch(3, 3), TEMPERATURE)
    assert expected.std() > 0.3, "near uniform: the temperature would not show"
    np.testing.assert_allclose(log_probs(full, random_batch(3, 3), 4), expected, atol=1e-5, rtol=0)
    assert {tensor.dtype for _, tensor in full.full_parameters("bfloat16")} == {torch.bfloat16}
    assert len(log_probs(full, DataProto())) == 0
    says(told(built, "/no/model"), "DataError", "actor_rollout_ref.model.path=/no/model", "model.safetensors")


def test_a_frozen_engine(random_models: dict[str, str]) -> None:
    run_ranks(1, frozen, random_models["tied"])


# --- on two ranks, one of which has bad rows -----------------------------------------------------------------------
FAULTS = {
    "inf advantage on rank 0": (0, "advantages", float("inf")),
    "inf advantage on rank 1": (1, "advantages", float("inf")),
    "nan old log-prob on rank 1": (1, "old_log_probs", float("nan")),
    "nan reference log-prob on rank 1": (1, "ref_log_probs", float("nan")),
    "gradient overflows": (1, "advantages", 1e30),
}


def poison(data: DataProto, column: str, value: float) -> DataProto:
    values = data[column].values.clone()
    values[-1] = value
    return DataProto({**data.batch, column: Ragged(values, data[column].offsets)}, data.non_tensor_batch)


@pytest.fixture(scope="module")
def messages(random_models: dict[str, str]) -> list[dict[str, str]]:
    return run_ranks(2, two_ranks, random_models["tied"])


def two_ranks(rank: int, path: str) -> dict[str, str]:
    """What is said of each fault; nothing was changed, and training can go on."""
    data = random_batch(num_groups=4, n=2).slice(4 * rank, 4 * rank + 4)
    engine, messages = trainable_engine(path, temperature=TEMPERATURE), {}
    before = flat(engine)
    for name, (bad_rank, column, value) in FAULTS.items():
        rows = poison(data, column, value) if rank == bad_rank else data
        messages[name] = told(step, engine, rows, 2)
    np.testing.assert_array_equal(flat(engine), before)
    assert not engine.optimizer.state, "no state was made: no step was taken"
    assert 0 < step(engine, data, 2)["actor/grad_norm"] < 1e6, "no gradient of the bad steps is left"
    assert not np.array_equal(flat(engine), before), "the next good step works"
    rows = engine.compute_log_probs(data if rank == 0 else DataProto(), PassLimits("", 2))
    assert len(rows) == (4 if rank == 0 else 0), "a rank without rows takes part"
    return messages


@pytest.mark.parametrize("fault", FAULTS)
def test_a_loss_that_is_not_finite_stops_every_rank_with_one_message(messages: list, fault: str) -> None:
    first, second = (rank[fault] for rank in messages)
    assert first == second
    bad_rank = FAULTS[fault][0]
    says(first, "TrainingDiverged", "optimizer step")
    if fault == "gradient overflows":
        says(first, "gradient norm", "inf")
    else:
        says(first, f"rank {bad_rank}", "loss")
        assert f"prompts p{2 * bad_rank}" in first or f"prompts p{2 * bad_rank + 1}" in first


def without_a_token(rank: int, path: str) -> None:
    """A step; masks of 0 on every rank; a token that an environment said, on rank 0; a mask of 0 on rank 1 only."""
    engine, data = trainable_engine(path), random_batch(num_groups=2, n=2)
    offsets = data["response_mask"].offsets
    none, observed = torch.zeros_like(data["response_mask"].values), torch.zeros(int(offsets[-1]))
    observed[3] = float(rank == 0)
    masked = DataProto({**data.batch, "response_mask": Ragged(none, offsets)}, data.non_tensor_batch)
    seen = masked.union(DataProto({"observation_mask": Ragged(observed, offsets)}))
    step(engine, data, 2)

    def state() -> np.ndarray:
        """Of the engine: weights, and the optimizer's momentum."""
        values = [v for states in engine.optimizer.state.values() for v in states.values()]
        return np.concatenate([*(whole(value).numpy().ravel() for value in values), flat(engine)])

    for number, (rows, coeff) in enumerate(((masked, 0.0), (seen, 0.5), (data if rank == 0 else masked, 0.0))):
        before, taken = state(), number > 0
        metrics = step(engine, rows, 2, objective(observation_coeff=coeff))
        assert np.array_equal(state(), before) != taken, number
        assert engine.schedule.last_epoch == 1 + number, "the schedule counts steps that were taken"
        assert metrics["actor/skipped_updates"] == 1 - taken, number
        assert taken or metrics["actor/grad_norm"] == 0
        assert taken or "actor/ppo_kl" not in metrics, "of no token there is no mean, which a controller would go by"


def test_a_mini_batch_without_a_trained_token_is_no_step(random_models: dict[str, str]) -> None:
    """Nor do weight decay and momentum move weights. A token on one rank is enough, of policy or environment."""
    run_ranks(2, without_a_token, random_models["tied"])


# --- frozen and moving towards another model -------------------------------------------------------------------------
def all_of(value: float, weights: dict[str, np.ndarray]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, torch.full(weight.shape, value)) for name, weight in weights.items())


def move(rank: int, path: str, folder: Path) -> None:
    """A quarter of the way to weights of 2 everywhere; saved; then all the way to 3; read again."""
    engine = built(path)
    first = weights(engine)
    log_probs(engine, random_batch(num_groups=1, n=2))  # which leaves weights gathered
    engine.mix_parameters(all_of(2.0, first), 0.25)
    mixed = weights(engine)
    assert_same(mixed, {name: 0.75 * weight + 0.5 for name, weight in first.items()}, rtol=1e-6, atol=1e-6)
    output = mixed.get("lm_head.weight", mixed["model.embed_tokens.weight"])
    np.testing.assert_array_equal(engine.output_layer("cpu").weight.numpy(), output)
    save(engine, folder / "ref")
    engine.mix_parameters(all_of(3.0, first), 1.0)
    assert (flat(engine) == 3).all()
    engine.load_checkpoint(folder / "ref")
    assert_same(weights(engine), mixed)
    says(told(engine.load_checkpoint, folder / "nowhere"), "CheckpointError", "nowhere", "checkpoint")


@pytest.mark.parametrize("case", first([("tied", 2), ("untied", 2), ("tied", 1)], ("untied", 2)))
def test_it_moves_and_is_read_again(random_models: dict[str, str], case: tuple[str, int], tmp_path: Path) -> None:
    model, ranks = case
    run_ranks(ranks, move, random_models[model], tmp_path)


def taken_over(rank: int, path: str, folder: Path) -> None:
    """A checkpoint of a reference that was held in bf16, read by one that is held in fp32; then a small move."""
    old, new = (built(path, model_dtype=dtype, compute_dtype="bf16") for dtype in ("bf16", "fp32"))
    old.mix_parameters(all_of(2.0, weights(old)), 0.25)
    save(old, folder)
    new.load_checkpoint(folder)
    read = weights(new)
    assert_same(read, weights(old))
    new.mix_parameters(all_of(3.0, read), 1e-3)  # which bf16 would round away
    assert_same(weights(new), {name: 0.999 * weight + 0.003 for name, weight in read.items()}, rtol=1e-6)
    assert {parameter.dtype for parameter in new.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("ranks", first([1, 2], 2))
def test_a_checkpoint_in_bf16_is_read_into_fp32(ranks: int, random_models: dict[str, str], tmp_path: Path) -> None:
    run_ranks(ranks, taken_over, random_models["tied"], tmp_path / "ref")


OFF = 0.03  # of a gradient in float16 from float32's, as a share of its norm
POLICY = objective(loss_mode="gpg", use_kl_loss=False, entropy_coeff=0.0)  # no ratio, which rounding might clip or not
# The loss, how large advantages are, and the scale.
CASES: dict[str, tuple[Any, float, float]] = {
    "actor": (POLICY, 1.0, 64.0),
    "critic": (value_settings(100.0, "token-mean"), 1.0, 64.0),
    "small gradients": (POLICY, 1e-6, START),
    "small gradients without a scale": (POLICY, 1e-6, 1.0),
}


def rows(rank: int, seed: int) -> DataProto:
    data = random_batch(num_groups=4, n=2, seed=seed)
    values = {"values": data["ref_log_probs"], "returns": data["advantages"]}
    return own_rows(DataProto({**data.batch, **values}, data.non_tensor_batch), rank)


def sgd(rank: int, paths: dict[str, str], size: int) -> dict[str, list[Any]]:
    """Of each case what a step moves, divided by its rate, and the gradient's norm: in float32 and in float16."""
    found: dict[str, list[Any]] = {}
    for (case, (settings, part, scale)), dtype in product(CASES.items(), ("fp32", "fp16")):
        data, head = rows(rank, 5), {"num_labels": 1, "key": "critic.model.path"} if case == "critic" else {}
        data["advantages"].values.mul_(part)
        engine = with_sgd(paths["critic" if head else "actor"], 1 / part, 1.0, compute_dtype=dtype, **head)
        engine.loss_scale, before = engine.loss_scale and LossScale(scale), flat(engine)
        norm = step(engine, data, size, settings)[f"{'critic' if head else 'actor'}/grad_norm"]
        assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
        found.setdefault(case, []).extend([before - flat(engine), norm])
    return found


@pytest.mark.parametrize("cut", first([(1, 8), (1, 2), (2, 1)], (2, 1)))
def test_a_step_is_that_of_float32(cut: tuple[int, int], random_models: dict[str, str], tmp_path: Path) -> None:
    """The scale is in every part of the backward pass, and in neither the step nor the norm."""
    ranks, size = cut
    paths = {"actor": random_models["untied"], "critic": random_classifier(tmp_path)}
    for case, (exact, norm, half, scaled_norm) in run_ranks(ranks, sgd, paths, size)[-1].items():
        off = np.linalg.norm(half - exact) / np.linalg.norm(exact)
        if case == "small gradients without a scale":
            assert off > 0.1, "the model has gradients that float16 has not"
        else:
            assert 0 < off < OFF, case
            assert scaled_norm == pytest.approx(norm, rel=OFF), case


# --- gradients that are not finite -----------------------------------------------------------------------------------
def train(engine: FSDPEngine, rank: int, seed: int = 0, advantage: float | None = None) -> dict[str, float]:
    data = rows(rank, seed)
    if advantage is not None and rank == 1:
        data["advantages"].values[-1] = advantage
    return step(engine, data)


def overflow(rank: int, path: str, folder: Path) -> None:
    """A loss, then gradients that are not finite; good steps, saved and read by other engines; the end of the scale."""
    loss_scale.GROWTH_INTERVAL = 3
    engine, again, other = (built(path, scheduled(), compute_dtype=dtype) for dtype in ("fp16", "fp16", "fp32"))
    says(told(train, engine, rank, 0, float("nan")), "TrainingDiverged", "rank 1", "loss", "nan")
    assert engine.loss_scale == LossScale(2.0**16), "a loss does not change it"
    engine.loss_scale, before = LossScale(2.0**40), flat(engine)
    skipped = train(engine, rank)
    assert (skipped["actor/skipped_updates"], skipped["actor/loss_scale"]) == (1, 2.0**39)
    assert "actor/grad_norm" not in skipped, "no mean of infinite numbers"
    np.testing.assert_array_equal(flat(engine), before)
    engine.loss_scale = LossScale(64.0)
    taken = [train(engine, rank, seed) for seed in (1, 2)]
    assert [metrics["actor/skipped_updates"] for metrics in taken] == [0, 0]
    assert taken[0]["actor/lr"] == skipped["actor/lr"], "the schedule has waited"
    save(engine, folder / "half")
    again.load_checkpoint(folder / "half")
    assert again.loss_scale == LossScale(64.0, 2)
    metrics, resumed = (train(each, rank, 3) for each in (engine, again))
    assert metrics == resumed
    assert metrics["actor/loss_scale"] == 128, "doubled after three steps"
    np.testing.assert_array_equal(flat(again), flat(engine))
    other.load_checkpoint(folder / "half")
    assert other.loss_scale is None
    save(other, folder / "full")
    again.load_checkpoint(folder / "full")
    assert again.loss_scale == LossScale(128.0, 0), "a checkpoint of float32 has none, and leaves what there is"
    engine.loss_scale = LossScale(2.0)
    assert told(train, engine, rank, 0, 1e30) == "", "it was halved to 1"
    says(told(train, engine, rank, 0, 1e30), "TrainingDiverged", "gradient norm")
    last = train(engine, rank)
    assert (last["actor/loss_scale"], last["actor/skipped_updates"]) == (1, 0)


def test_an_infinite_gradient_skips_the_step(random_models: dict[str, str], tmp_path: Path) -> None:
    """On both ranks, of which one has the bad row."""
    run_ranks(2, overflow, random_models["tied"], tmp_path)
