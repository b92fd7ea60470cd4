"""One step of the engine against the same step in plain PyTorch; and what it does with a loss that is not finite."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_dist.algorithms import policy_objective
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import fsdp_engine
from grpo_dist.engines.train.objectives import Loss
from grpo_dist.engines.train.sharded_tensors import whole
from grpo_dist.protocol import DataProto, Ragged, metric_values
from tests.engines.train.plain import built, causal_lm, response_logits, told, weights
from tests.messages import says
from tests.models import objective, random_batch, random_qwen3, trainable_engine
from tests.ranks import run_ranks

TEMPERATURE, ENTROPY_COEFF = 0.7, 0.5


def plain_step(path: str, data: DataProto, entropy_coeff: float) -> dict[str, Any]:
    """Loss, entropy, gradient norm and the weights after one clipped AdamW step, without FSDP or micro-batches."""
    model = causal_lm(path)
    scaled = [torch.log_softmax(logits / TEMPERATURE, -1) for logits in response_logits(model, data)]
    rows = [
        row.gather(-1, ids.long()[:, None])[:, 0] for row, ids in zip(scaled, data["responses"].rows(), strict=True)
    ]
    log_probs = torch.nn.utils.rnn.pad_sequence(rows, True)
    entropy = torch.nn.utils.rnn.pad_sequence([-(row.exp() * row).sum(-1) for row in scaled], True)
    mask = data["response_mask"].to_padded(0).float()
    columns = {name: data[name].to_padded(0.0) for name in ("old_log_probs", "advantages", "ref_log_probs")}
    columns |= {"log_probs": log_probs, "response_mask": mask, "entropy": entropy}
    counts = {"global_tokens": mask.sum(), "global_sequences": float(len(data))}
    loss, _ = policy_objective(columns, objective(entropy_coeff=entropy_coeff), **counts)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01).step()
    return {
        "log_probs": torch.cat(rows).detach().numpy(),
        "entropy": float((entropy.detach() * mask).sum() / mask.sum()),
        "loss": loss.item(),
        "grad_norm": norm.item(),
        "weights": {name: p.detach().numpy().copy() for name, p in model.named_parameters()},
        "gradients": {name: p.grad.numpy() for name, p in model.named_parameters()},
    }


# --- on one rank -------------------------------------------------------------------------------------------------
def one_rank(rank: int, path: str) -> dict[str, Any]:
    data = random_batch(num_groups=3, n=3)
    out: dict[str, Any] = {}
    for coefficient in (0.0, ENTROPY_COEFF):
        engine = trainable_engine(path, temperature=TEMPERATURE)
        before = [engine.compute_log_probs(data, PassLimits("", size)) for size in (1, 4, 100)]
        metrics = engine.train_mini_batch(data, objective(entropy_coeff=coefficient), PassLimits("", 4)).metrics
        out[f"entropy_coeff={coefficient}"] = {
            "plain": plain_step(path, data, coefficient),
            "metrics": metric_values(metrics),
            "weights": weights(engine),
            "log_probs": [column.values.numpy().copy() for column in before],
        }
    frozen, mixed = (built(path, temperature=TEMPERATURE, compute_dtype=dtype) for dtype in ("fp32", "bf16"))
    out["frozen"] = {
        "sharded": [isinstance(each.model, FSDPModule) for each in (frozen, mixed, engine)],
        "trainable": [name for name, p in frozen.model.named_parameters() if p.requires_grad],
        "log_probs": frozen.compute_log_probs(data, PassLimits("", 4)).values.numpy(),
        "bf16": {str(tensor.dtype) for _, tensor in frozen.full_parameters("bfloat16")},
        "no rows": len(frozen.compute_log_probs(DataProto(), PassLimits("", 4))),
    }
    return out | {"no model": told(built, "/no/model")}


@pytest.fixture(scope="module")
def alone(random_models: dict[str, str]) -> dict[str, Any]:
    (out,) = run_ranks(1, one_rank, random_models["tied"])
    return out


CASES = ["entropy_coeff=0.0", f"entropy_coeff={ENTROPY_COEFF}"]


def test_log_probs_equal_a_plain_forward_of_each_row_alone(alone: dict[str, Any]) -> None:
    """Also those of an engine that is frozen."""
    plain = alone[CASES[0]]["plain"]["log_probs"]
    assert plain.std() > 0.3, "near uniform: the temperature would not show"
    for found in (*alone[CASES[0]]["log_probs"], alone["frozen"]["log_probs"]):
        np.testing.assert_allclose(found, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_step_equal_plain_pytorch(alone: dict[str, Any], case: str) -> None:
    plain, metrics = alone[case]["plain"], alone[case]["metrics"]
    assert metrics["actor/loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
    assert metrics["actor/grad_norm"] > 1.0, "the norm is reported before clipping, and clipping was at work"
    assert metrics["actor/lr"] == 1e-2
    for name, weight in plain["weights"].items():
        # Adam's first step is lr * sign(gradient), which turns the rounding of a gradient near zero into a real step
        sure = np.abs(plain["gradients"][name]) > 1e-6
        assert sure.mean() > 0.9 or "embed" in name
        np.testing.assert_allclose(alone[case]["weights"][name][sure], weight[sure], atol=1e-4, rtol=0, err_msg=name)


def test_entropy_is_a_bonus_of_its_own_metric(alone: dict[str, Any]) -> None:
    without, with_ = (alone[case] for case in CASES)
    entropy = with_["plain"]["entropy"]
    assert with_["metrics"]["actor/entropy"] == pytest.approx(entropy, rel=1e-4)
    assert 0.1 < entropy < 4.5, "between a point and the uniform distribution over 96 ids"
    difference = without["metrics"]["actor/loss"] - with_["metrics"]["actor/loss"]
    assert difference == pytest.approx(ENTROPY_COEFF * entropy, rel=1e-4)
    assert "actor/entropy" not in without["metrics"], "not computed where it is not used"


def test_a_frozen_engine(alone: dict[str, Any]) -> None:
    found = alone["frozen"]
    assert found["trainable"] == []
    assert found["sharded"] == [False, True, True], "FSDP2 would hold its weights twice; it casts those of another type"
    assert found["bf16"] == {"torch.bfloat16"}
    assert found["no rows"] == 0
    says(alone["no model"], "DataError", "actor_rollout_ref.model.path=/no/model", "model.safetensors")


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
    """A step, a mini-batch whose mask is 0 on every rank, one in which rank 0 has a token that an environment said, and
    one whose mask is 0 on rank 1 only.
    """
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
    """Neither weight decay nor Adam's momentum moves the weights; a token on one rank is enough for a step on all, the
    policy's or, with observation_coeff, an environment's.
    """
    for found in run_ranks(2, without_a_token, random_models["tied"]):
        assert found["moved"] == [False, True, True]
        assert found["places"] == [1, 1, 2, 3], "the schedule counts steps that were taken"
        assert [metrics["actor/skipped_updates"] for metrics in found["metrics"]] == [1.0, 0.0, 0.0]
        assert found["metrics"][0]["actor/grad_norm"] == 0
        assert "actor/ppo_kl" not in found["metrics"][0], "of no token there is no mean, which a controller would go by"


READERS = ("fsdp_engine", "objectives", "objective", "aggregate", "masking", "clipped", "kl")


class Reads(TorchDispatchMode):
    """Lists, in their order, backward passes and the numbers that the engine and its objective read from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            files = [Path(frame.filename) for frame in traceback.extract_stack() if "grpo_dist" in frame.filename]
            self.events += [file.stem for file in files[-1:] if file.stem in READERS]
        return func(*args, **(kwargs or {}))


def read_numbers(rank: int, path: str) -> list[str]:
    engine, data = trainable_engine(path), random_batch(num_groups=4, n=2)
    engine.train_mini_batch(data, objective(), PassLimits("", 2))
    backward = torch.Tensor.backward
    reads, read_metrics = Reads(), fsdp_engine.read_metrics

    def read(losses: Sequence[Loss]) -> Any:
        held = [value for loss in losses for value in (loss.loss, *loss.sums.values(), *loss.means.values())]
        assert not any(value.requires_grad for value in held), "the graphs of all passes would live until here"
        return read_metrics(losses)

    with (
        reads,
        mock.patch.object(fsdp_engine, "read_metrics", read),
        mock.patch.object(torch.Tensor, "backward", lambda x: reads.events.append("backward") or backward(x)),
    ):
        engine.train_mini_batch(data, objective(), PassLimits("", 2))
    return reads.events


def test_numbers_are_read_after_the_last_pass(random_models: dict[str, str]) -> None:
    """Until then a GPU has work, and nobody waits for it."""
    (events,) = run_ranks(1, read_numbers, random_models["tied"])
    first, last = events.index("backward"), len(events) - events[::-1].index("backward")
    assert events[first:last] == ["backward"] * 4
    assert events[last:]


def master_weights(rank: int, path: str) -> list[list[str]]:
    """Names of weights that are not the fp32 ones after a forward-only pass, frozen and trained."""
    ranks, rows = torch.distributed.get_world_size(), random_batch(num_groups=2, n=2)
    frozen, trained = built(path, compute_dtype="bf16"), trainable_engine(path, dtype="bf16")
    trained.train_mini_batch(rows.index(np.arange(4)[rank::ranks]), objective(), PassLimits("", 1))
    found = []
    for engine in (frozen, trained):
        before = weights(engine)
        engine.compute_log_probs(rows, PassLimits("", 2))
        found.append([key for key, weight in weights(engine).items() if not np.array_equal(before[key], weight)])
        query = torch.from_numpy(before["model.layers.0.self_attn.q_proj.weight"])
        assert not torch.equal(query, query.bfloat16().float()), "bf16 would show"
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.deep
def test_a_forward_pass_in_bf16_leaves_no_rounded_copies_behind(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(ranks, master_weights, random_qwen3(tmp_path)):
        assert found == [[], []]
