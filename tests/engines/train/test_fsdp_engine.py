"""An engine that is frozen, one without a finite loss or a token that trains, and a moving reference."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.sharded_tensors import whole
from grpo_dist.protocol import DataProto, Ragged, metric_values
from tests.engines.train.plain import built, one_by_one, told, weights
from tests.messages import says
from tests.models import objective, random_batch, trainable_engine
from tests.ranks import run_ranks

TEMPERATURE = 0.7


def frozen(rank: int, path: str) -> dict[str, Any]:
    engines = [built(path, temperature=TEMPERATURE, compute_dtype=dtype) for dtype in ("fp32", "bf16")]
    return {
        "sharded": [isinstance(each.model, FSDPModule) for each in (*engines, trainable_engine(path))],
        "trainable": [name for name, p in engines[0].model.named_parameters() if p.requires_grad],
        "log_probs": engines[0].compute_log_probs(random_batch(3, 3), PassLimits("", 4)).values.numpy().copy(),
        "bf16": {str(tensor.dtype) for _, tensor in engines[0].full_parameters("bfloat16")},
        "no rows": len(engines[0].compute_log_probs(DataProto(), PassLimits("", 4))),
        "no model": told(built, "/no/model"),
    }


def test_a_frozen_engine(random_models: dict[str, str]) -> None:
    (found,) = run_ranks(1, frozen, random_models["tied"])
    expected = one_by_one(random_models["tied"], random_batch(3, 3), TEMPERATURE)
    assert expected.std() > 0.3, "near uniform: the temperature would not show"
    np.testing.assert_allclose(found["log_probs"], expected, atol=1e-5, rtol=0)
    assert found["trainable"] == []
    assert found["sharded"] == [False, True, True], "FSDP2 would hold its weights twice; it casts those of another type"
    assert found["bf16"] == {"torch.bfloat16"}
    assert found["no rows"] == 0
    says(found["no model"], "DataError", "actor_rollout_ref.model.path=/no/model", "model.safetensors")


# --- on two ranks, one of which has bad rows -----------------------------------------------------------------------
FAULTS = {
    "inf advantage on rank 0": (0, "advantages", float("inf")),
    "inf advantage on rank 1": (1, "advantages", float("inf")),
    "nan old log-prob on rank 1": (1, "old_log_probs", float("nan")),
    "nan reference log-prob on rank 1": (1, "ref_log_probs", float("nan")),
    "gradient overflows": (1, "advantages", 1e30),
}


def poison(data: DataProto, column: str, value: float) -> DataProto:
    """`value` in the last token of the last row."""
    values = data[column].values.clone()
    values[-1] = value
    return DataProto({**data.batch, column: Ragged(values, data[column].offsets)}, data.non_tensor_batch)


def two_ranks(rank: int, path: str) -> dict[str, Any]:
    data = random_batch(num_groups=4, n=2).index([[0, 1, 2, 3], [4, 5, 6, 7]][rank])
    engine = trainable_engine(path, temperature=TEMPERATURE)
    before = weights(engine)
    messages = {}
    for name, (bad_rank, column, value) in FAULTS.items():
        rows = poison(data, column, value) if rank == bad_rank else data
        messages[name] = told(engine.train_mini_batch, rows, objective(), PassLimits("", 2))
    after = weights(engine)
    state = dict(engine.optimizer.state)
    metrics = engine.train_mini_batch(data, objective(), PassLimits("", 2)).metrics
    return {
        "messages": messages,
        "changed": [name for name in before if (before[name] != after[name]).any()],
        "optimizer": len(state),
        "next step": metric_values(metrics),
        "moved": any((before[name] != weight).any() for name, weight in weights(engine).items()),
        "no rows on rank 1": len(engine.compute_log_probs(data if rank == 0 else DataProto(), PassLimits("", 2))),
    }


@pytest.fixture(scope="module")
def pair(random_models: dict[str, str]) -> list[dict[str, Any]]:
    return run_ranks(2, two_ranks, random_models["tied"])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_loss_that_is_not_finite_stops_every_rank_with_one_message(pair: list, fault: str) -> None:
    first, second = (rank["messages"].get(fault) for rank in pair)
    assert first == second
    bad_rank = FAULTS[fault][0]
    if fault == "gradient overflows":
        says(first, "TrainingDiverged", "gradient norm", "inf")
    else:
        says(first, "TrainingDiverged", f"rank {bad_rank}", "loss")
        assert f"prompts p{2 * bad_rank}" in first or f"prompts p{2 * bad_rank + 1}" in first
    says(first, "optimizer step")


def test_nothing_was_changed_and_training_can_go_on(pair: list) -> None:
    """A rank without rows takes part."""
    assert [rank["no rows on rank 1"] for rank in pair] == [4, 0]
    for rank in pair:
        assert rank["changed"] == []
        assert rank["optimizer"] == 0, "no state was made: no step was taken"
        assert rank["moved"], "the next good step works"
        assert 0 < rank["next step"]["actor/grad_norm"] < 1e6, "no gradient of the bad steps is left"


def without_a_token(rank: int, path: str) -> dict[str, Any]:
    """A step; masks of 0 on every rank; a token that an environment said, on rank 0; a mask of 0 on rank 1 only."""
    engine = trainable_engine(path)
    data = random_batch(num_groups=2, n=2)
    mask = {"response_mask": Ragged(torch.zeros_like(data["response_mask"].values), data["response_mask"].offsets)}
    masked = data.select([name for name in data.columns() if name != "response_mask"]).union(DataProto(mask))
    engine.train_mini_batch(data, objective(), PassLimits("", 2))

    def state() -> list[np.ndarray]:
        values = [v for states in engine.optimizer.state.values() for v in states.values()]
        return [*(whole(value).numpy().copy() for value in values), *weights(engine).values()]

    states, places, metrics = [state()], [engine.schedule.last_epoch], []
    observed = torch.zeros_like(data["response_mask"].values).float()
    observed[3] = float(rank == 0)
    seen = masked.union(DataProto({"observation_mask": Ragged(observed, data["response_mask"].offsets)}))
    for rows, settings in (
        (masked, objective()),
        (seen, objective(observation_coeff=0.5)),
        (data if rank == 0 else masked, objective()),
    ):
        metrics.append(metric_values(engine.train_mini_batch(rows, settings, PassLimits("", 2)).metrics))
        states.append(state())
        places.append(engine.schedule.last_epoch)
    moved = [any((a != b).any() for a, b in zip(*pair, strict=True)) for pair in pairwise(states)]
    return {"moved": moved, "places": places, "metrics": metrics}


def test_a_mini_batch_without_a_trained_token_is_no_step(random_models: dict[str, str]) -> None:
    """Nor do weight decay and momentum move weights. A token on one rank is enough, of policy or environment."""
    for found in run_ranks(2, without_a_token, random_models["tied"]):
        assert found["moved"] == [False, True, True]
        assert found["places"] == [1, 1, 2, 3], "the schedule counts steps that were taken"
        assert [metrics["actor/skipped_updates"] for metrics in found["metrics"]] == [1.0, 0.0, 0.0]
        assert found["metrics"][0]["actor/grad_norm"] == 0
        assert "actor/ppo_kl" not in found["metrics"][0], "of no token there is no mean, which a controller would go by"


# --- frozen and moving towards another model -------------------------------------------------------------------------
def move(rank: int, path: str, folder: Path) -> dict[str, Any]:
    """A quarter of the way to weights of 2 everywhere; saved; then all the way to 3; read again."""
    engine = built(path)
    first = weights(engine)
    engine.compute_log_probs(random_batch(num_groups=1, n=2), PassLimits("", 2))  # which leaves weights gathered
    engine.mix_parameters(((name, torch.full(value.shape, 2.0)) for name, value in first.items()), 0.25)
    mixed = weights(engine)
    head = engine.output_layer("cpu")
    engine.begin_save(folder / "ref")
    assert engine.finished_save(wait=True) is not None
    engine.mix_parameters(((name, torch.full(value.shape, 3.0)) for name, value in first.items()), 1.0)
    replaced = weights(engine)
    engine.load_checkpoint(folder / "ref")
    message = told(engine.load_checkpoint, folder / "nowhere")
    found = {"first": first, "mixed": mixed, "replaced": replaced, "read": weights(engine)}
    return found | {"head": head.weight.numpy(), "message": message}


@pytest.mark.parametrize(("model", "size"), [("tied", 2), ("untied", 2), ("tied", 1)])
def test_it_moves_and_is_read_again(random_models: dict[str, str], model: str, size: int, tmp_path: Path) -> None:
    """On two ranks, and on one, which holds it whole."""
    ranks = run_ranks(size, move, random_models[model], tmp_path)
    for rank in ranks:
        for name, first in rank["first"].items():
            np.testing.assert_allclose(rank["mixed"][name], 0.75 * first + 0.5, rtol=1e-6, atol=1e-6)
            assert (rank["replaced"][name] == 3).all()
            np.testing.assert_array_equal(rank["read"][name], rank["mixed"][name])
        output = "lm_head.weight" if model == "untied" else "model.embed_tokens.weight"
        np.testing.assert_array_equal(rank["head"], rank["mixed"][output])
        says(rank["message"], "CheckpointError", "nowhere", "checkpoint")


def taken_over(rank: int, path: str, folder: Path) -> dict[str, Any]:
    """A checkpoint of a reference that was held in bf16, read by one that is held in fp32; then a small move."""
    old, new = (built(path, model_dtype=dtype, compute_dtype="bf16") for dtype in ("bf16", "fp32"))
    old.mix_parameters(((name, torch.full(value.shape, 2.0)) for name, value in weights(old).items()), 0.25)
    old.begin_save(folder)
    old.finished_save(wait=True)
    new.load_checkpoint(folder)
    read = weights(new)
    new.mix_parameters(((name, torch.full(value.shape, 3.0)) for name, value in read.items()), 1e-3)
    types = {str(parameter.dtype) for parameter in new.model.parameters()}
    return {"saved": weights(old), "read": read, "moved": weights(new), "types": types}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_in_bf16_is_read_into_fp32(ranks: int, random_models: dict[str, str], tmp_path: Path) -> None:
    for found in run_ranks(ranks, taken_over, random_models["tied"], tmp_path / "ref"):
        assert found["types"] == {"torch.float32"}
        for name, saved in found["saved"].items():
            np.testing.assert_array_equal(found["read"][name], saved)
            expected = 0.999 * saved + 0.003
            np.testing.assert_allclose(found["moved"][name], expected, rtol=1e-6, err_msg="which bf16 would round away")
