"""Passes in float16 beside float32 weights: gradients, steps that are skipped, and the scale of the loss."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import loss_scale
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.loss_scale import START, LossScale
from grpo_dist.protocol import DataProto, metric_values
from tests.engines.train.plain import built, told, weights, with_sgd
from tests.messages import says
from tests.models import objective, random_batch, random_classifier, scheduled
from tests.ranks import run_ranks
from tests.worker_settings import value_settings

OFF = 0.03  # of a gradient in float16 from float32's, as a share of its norm
POLICY = objective(loss_mode="gpg", use_kl_loss=False, entropy_coeff=0.0)  # no ratio, which rounding might clip or not
# The loss, how large advantages are, and the scale.
CASES: dict[str, tuple[Any, float, float]] = {
    "actor": (POLICY, 1.0, 64.0),
    "critic": (value_settings(100.0, "token-mean"), 1.0, 64.0),
    "small gradients": (POLICY, 1e-6, START),
    "small gradients without a scale": (POLICY, 1e-6, 1.0),
}


def own_rows(rank: int, seed: int) -> DataProto:
    data = random_batch(num_groups=4, n=2, seed=seed)
    values = {"values": data["ref_log_probs"], "returns": data["advantages"]}
    rows = list(range(rank, 8, torch.distributed.get_world_size()))
    return DataProto({**data.batch, **values}, data.non_tensor_batch).index(rows)


def sgd(rank: int, paths: dict[str, str], size: int) -> dict[str, list[Any]]:
    """Of each case what a step moves, divided by its rate, and the gradient's norm: in float32 and in float16."""
    found: dict[str, list[Any]] = {}
    for (case, (settings, part, scale)), dtype in product(CASES.items(), ("fp32", "fp16")):
        data, head = own_rows(rank, 5), {"num_labels": 1, "key": "critic.model.path"} if case == "critic" else {}
        data["advantages"].values.mul_(part)
        engine = with_sgd(paths["critic" if head else "actor"], 1 / part, 1.0, compute_dtype=dtype, **head)
        engine.loss_scale, before = engine.loss_scale and LossScale(scale), weights(engine)
        metrics = engine.train_mini_batch(data, settings, PassLimits("", size)).metrics
        assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
        moved = np.concatenate([(before[name] - weight).ravel() for name, weight in weights(engine).items()])
        found.setdefault(case, []).extend([moved, metric_values(metrics)[f"{'critic' if head else 'actor'}/grad_norm"]])
    return found


@pytest.mark.parametrize(("ranks", "size"), [(1, 8), (1, 2), (2, 1)])
def test_a_step_is_that_of_float32(ranks: int, size: int, random_models: dict[str, str], tmp_path: Path) -> None:
    """The scale is in every part of the backward pass, and in neither the step nor the norm."""
    paths = {"actor": random_models["untied"], "critic": random_classifier(tmp_path)}
    for case, (exact, norm, half, scaled_norm) in run_ranks(ranks, sgd, paths, size)[-1].items():
        off = np.linalg.norm(half - exact) / np.linalg.norm(exact)
        if case == "small gradients without a scale":
            assert off > 0.1, "the model has gradients that float16 has not"
        else:
            assert 0 < off < OFF, case
            assert scaled_norm == pytest.approx(norm, rel=OFF), case


# --- gradients that are not finite -----------------------------------------------------------------------------------
def step(engine: FSDPEngine, rank: int, seed: int = 0, advantage: float | None = None) -> dict[str, float]:
    data = own_rows(rank, seed)
    if advantage is not None and rank == 1:
        data["advantages"].values[-1] = advantage
    return metric_values(engine.train_mini_batch(data, objective(), PassLimits("", 4)).metrics)


def overflow(rank: int, path: str, folder: Path) -> dict[str, Any]:
    """A loss, then gradients that are not finite; good steps, saved and read by other engines; the end of the scale."""
    loss_scale.GROWTH_INTERVAL = 3
    first, again, other = (built(path, scheduled(), compute_dtype=dtype) for dtype in ("fp16", "fp16", "fp32"))
    found: dict[str, Any] = {"loss": told(step, first, rank, 0, float("nan")), "start": first.loss_scale}
    first.loss_scale, before = LossScale(2.0**40), weights(first)
    found["first"] = [step(first, rank)]
    found["same"] = all(np.array_equal(before[name], weight) for name, weight in weights(first).items())
    first.loss_scale = LossScale(64.0)
    found["first"] += [step(first, rank, seed) for seed in (1, 2)]
    for source, target, name in ((first, again, "a"), (first, other, "b"), (other, again, "c")):
        source.begin_save(folder / name)
        source.finished_save(wait=True)
        target.load_checkpoint(folder / name)
        found[name] = target.loss_scale and replace(target.loss_scale)
        if name == "a":
            found["last"] = [(step(engine, rank, 3), weights(engine)) for engine in (first, again)]
    first.loss_scale = LossScale(2.0)
    return found | {"end": [told(step, first, rank, 0, 1e30) for _ in range(2)], "next": step(first, rank)}


def test_an_infinite_gradient_skips_the_step(random_models: dict[str, str], tmp_path: Path) -> None:
    """On both ranks, of which one has the bad row."""
    for found in run_ranks(2, overflow, random_models["tied"], tmp_path):
        says(found["loss"], "TrainingDiverged", "rank 1", "loss", "nan")
        assert found["start"] == LossScale(2.0**16), "a loss does not change it"
        skipped, *taken = found["first"]
        assert (skipped["actor/skipped_updates"], skipped["actor/loss_scale"], found["same"]) == (1, 2.0**39, True)
        assert "actor/grad_norm" not in skipped, "no mean of infinite numbers"
        assert [metrics["actor/skipped_updates"] for metrics in taken] == [0, 0]
        assert taken[0]["actor/lr"] == skipped["actor/lr"], "the schedule has waited"
        (metrics, left), (resumed, right) = found["last"]
        assert metrics == resumed
        assert all(np.array_equal(left[name], right[name]) for name in left)
        assert metrics["actor/loss_scale"] == 128, "doubled after three steps"
        # a checkpoint of float32 has none, and leaves what there is
        assert [found[name] for name in "abc"] == [LossScale(64.0, 2), None, LossScale(128.0, 0)]
        assert found["end"][0] == "", "it was halved to 1"
        says(found["end"][1], "TrainingDiverged", "gradient norm")
        assert (found["next"]["actor/loss_scale"], found["next"]["actor/skipped_updates"]) == (1, 0)
