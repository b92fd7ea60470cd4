"""One optimizer step per batch: old log-probs taken from the update itself change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.protocol import DataProto, metric_values
from tests.models import objective, random_batch, random_qwen3, trainable_engine
from tests.ranks import run_ranks

LIMITS: dict[str, Any] = {"micro_batch_size": 4}


def both_ways(rank: int, path: str) -> dict[str, Any]:
    data = random_batch(num_groups=3, n=4)
    data = data.select([name for name in data.columns() if name != "old_log_probs"])
    out: dict[str, Any] = {}
    for way in ("before", "update"):
        engine = trainable_engine(path)
        engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
        batch, own = data, way == "update"
        if not own:
            batch = data.union(DataProto({"old_log_probs": engine.compute_log_probs(data, **LIMITS)}))
        result = engine.train_mini_batch(batch, objective=objective(on_policy=own), **LIMITS)
        old = result.log_probs if own else batch["old_log_probs"]
        out[way] = {
            "old": old.values.numpy(),
            "metrics": metric_values(result.metrics),
            "weights": {name: tensor.numpy().copy() for name, tensor in engine.full_parameters("float32")},
        }
    return out


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(1, both_ways, random_qwen3(tmp_path_factory.mktemp("model")))[0]


def test_the_log_probs_are_the_same(ways: dict[str, Any]) -> None:
    np.testing.assert_allclose(ways["update"]["old"], ways["before"]["old"], atol=2e-6)


def test_the_step_is_the_same(ways: dict[str, Any]) -> None:
    before, update = ways["before"], ways["update"]
    assert update["metrics"] == pytest.approx(before["metrics"], rel=1e-5, abs=1e-6)
    for name, weights in before["weights"].items():
        np.testing.assert_allclose(update["weights"][name], weights, atol=1e-6, err_msg=name)


def test_the_ratio_is_exactly_one(ways: dict[str, Any]) -> None:
    assert ways["update"]["metrics"]["actor/ppo_kl"] == 0
