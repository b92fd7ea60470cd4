"""A step with responses that could not be scored is the step without them, however the work is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.settings import TargetSettings
from grpo_dist.algorithms.targets import compute_targets
from grpo_dist.engines.settings import PassLimits
from grpo_dist.protocol import DataProto, Ragged, merge_metrics, metric_values
from tests.models import objective, random_batch, random_qwen3, trainable_engine
from tests.ranks import run_ranks

pytestmark = pytest.mark.deep

FAILED = [1, 6, 8, 9, 10, 11]  # of three groups of four: one, one and all
LEFT = [row for row in range(12) if row not in FAILED]
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
CUTS: dict[str, tuple[list[list[int]], int, str]] = {
    "whole": ([list(range(12))], 12, "shared"),
    "one by one": ([list(range(12))], 1, "shared"),
    "packed": ([list(range(12))], 5, "packed"),
    "padded": ([list(range(12))], 3, "padded"),
    "two ranks, one with failed ones alone": ([[0, 1, 2, 3, 4, 5, 7], [6, 8, 9, 10, 11]], 2, "shared"),
}


def scored_batch() -> DataProto:
    """Scores below 0, with what `compute_targets` makes of them."""
    data = random_batch(num_groups=3, n=4)
    lengths = data["responses"].lengths
    scores = -1 - torch.arange(12.0) % 5
    scores[FAILED] = torch.nan
    at_end = torch.zeros(12, int(lengths.max()))
    at_end[torch.arange(12), lengths - 1] = scores
    columns = {name: data[name].to_padded(0.0) for name in ("response_mask", "old_log_probs")}
    out, _ = compute_targets(
        columns | {"token_level_scores": at_end, "rollout_log_probs": columns["old_log_probs"]},
        TargetSettings("grpo"),
        index=data["uid"],
        truncated=torch.zeros(12),
        scored=~scores.isnan(),
    )
    made = {name: Ragged.from_padded(out[name], lengths) for name in ("advantages", "response_mask")}
    return data.select([name for name in data.columns() if name not in made]).union(DataProto(made))


def step(rank: int, path: str, data: DataProto, shards: list[list[int]], size: int, layout: str) -> dict[str, Any]:
    """An optimizer step by each aggregation on this rank's rows."""
    out = {}
    for mode in MODES:
        engine = trainable_engine(path, layout=layout)
        engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
        settings = objective(loss_agg_mode=mode, loss_scale_factor=12.0)
        result = engine.train_mini_batch(data.index(shards[rank]), settings, PassLimits("", size))
        weights = {name: tensor.numpy().copy() for name, tensor in engine.full_parameters("float32")}
        out[mode] = result.metrics, weights
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def without(path: str) -> dict[str, Any]:
    """The step on the other responses alone."""
    return run_ranks(1, step, path, scored_batch().index(LEFT), [list(range(len(LEFT)))], 12, "shared")[0]


@pytest.mark.parametrize("cut", CUTS)
def test_the_step_is_that_of_the_others(path: str, without: dict[str, Any], cut: str) -> None:
    shards, size, layout = CUTS[cut]
    ranks = run_ranks(len(shards), step, path, scored_batch(), shards, size, layout)
    for mode in MODES:
        expected, weights = without[mode]
        found = metric_values(merge_metrics([rank[mode][0] for rank in ranks]))
        assert found == pytest.approx(metric_values(expected), rel=1e-4, abs=1e-6), mode
        for name, weight in weights.items():
            np.testing.assert_allclose(ranks[0][mode][1][name], weight, rtol=1e-4, atol=1e-5, err_msg=f"{mode} {name}")
