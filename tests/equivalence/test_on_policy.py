"""One optimizer step per batch: old log-probs, and weights against the sampler, taken from the update itself change
nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.correction import compute_rollout_correction
from grpo_dist.engines.settings import PassLimits
from grpo_dist.protocol import DataProto, Ragged, metric_values
from tests.models import objective, random_batch, random_qwen3, trainable_engine
from tests.ranks import run_ranks

LIMITS: dict[str, Any] = {"limits": PassLimits("", 4)}


def both_ways(rank: int, path: str, rollout_is: str | None) -> dict[str, Any]:
    data = random_batch(num_groups=3, n=4)
    options = {"rollout_is": rollout_is, "rollout_is_threshold": 1.1}
    sampler = DataProto({"rollout_log_probs": data["old_log_probs"]})
    data = data.select([name for name in data.columns() if name != "old_log_probs"]).union(sampler)
    out: dict[str, Any] = {}
    for way in ("before", "update"):
        engine = trainable_engine(path)
        engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
        batch, own = data, way == "update"
        if not own:
            batch = data.union(DataProto({"old_log_probs": engine.compute_log_probs(data, **LIMITS)}))
            batch = batch.union(DataProto({"rollout_is_weights": importance_weights(batch, options)}))
        correction = options if own and rollout_is else None
        loss = objective(on_policy=own, weighted=not own, correction=correction)
        result = engine.train_mini_batch(batch, objective=loss, **LIMITS)
        old = result.log_probs if own else batch["old_log_probs"]
        out[way] = {
            "old": old.values.numpy(),
            "metrics": metric_values(result.metrics),
            "weights": {name: tensor.numpy().copy() for name, tensor in engine.full_parameters("float32")},
        }
    return out


def importance_weights(batch: DataProto, options: dict[str, Any]) -> Ragged:
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    columns = {name: batch[name].to_padded(0) for name in names}
    weights, _, _ = compute_rollout_correction(**columns, **options)
    weights = torch.ones_like(columns["old_log_probs"]) if weights is None else weights
    return Ragged.from_padded(weights, batch["responses"].lengths)


@pytest.fixture(scope="module", params=[None, "token", "sequence"])
def ways(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(1, both_ways, random_qwen3(tmp_path_factory.mktemp("model")), request.param)[0]


@pytest.mark.deep
def test_the_log_probs_are_the_same(ways: dict[str, Any]) -> None:
    np.testing.assert_allclose(ways["update"]["old"], ways["before"]["old"], atol=2e-6)


def test_the_step_is_the_same(ways: dict[str, Any]) -> None:
    before, update = ways["before"], ways["update"]
    assert update["metrics"] == pytest.approx(before["metrics"], rel=1e-5, abs=1e-6)
    for name, weights in before["weights"].items():
        np.testing.assert_allclose(update["weights"][name], weights, atol=1e-6, err_msg=name)


def test_the_ratio_is_exactly_one(ways: dict[str, Any]) -> None:
    assert ways["update"]["metrics"]["actor/ppo_kl"] == 0
