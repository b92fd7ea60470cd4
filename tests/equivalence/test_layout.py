"""Loss and updated weights do not depend on micro-batch size or rank count. Test number one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.engines.settings import PassLimits
from grpo_dist.protocol import DataProto, Ragged, merge_metrics, metric_values
from tests.models import objective, random_batch, random_qwen3, trainable_engine
from tests.ranks import run_ranks
from tests.tiers import covering

# Every aggregation mode; with them the exact KL, importance weights and selected tokens take their turns.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "seq-mean-token-mean": {"kl_loss_type": "full", "entropy_coeff": 0.0},
    "seq-mean-token-sum": {"weighted": True, "loss_mode": "gspo", "off_policy_threshold": 1.0},
    "seq-mean-token-sum-norm": {"kl_loss_type": "k3+", "loss_scale_factor": 12.0, "loss_mode": "cispo"},
    "prompt-mean": {"loss_mode": "vespo", "use_kl_loss": False, "observation_coeff": 0.5},
    "token-sum": {"loss_mode": "kl_cov", "selects_tokens": True, "kl_loss_type": "unbiased_k3"},
}
MODES = tuple(OBJECTIVES)
HIDDEN = 32


def batch() -> DataProto:
    """16 rows with every column that an objective may read."""
    data = random_batch(num_groups=4, n=4)
    rng = np.random.default_rng(5)
    lengths, masks = data["responses"].lengths.tolist(), [row.numpy() for row in data["response_mask"].rows()]
    extra = {
        "ref_hidden_states": [rng.normal(size=(length, HIDDEN)) for length in lengths],
        "rollout_is_weights": [rng.uniform(0.5, 2, length) for length in lengths],
        "rollout_log_probs": [-4.5 + 0.2 * rng.normal(size=length) for length in lengths],
        "selected_tokens": [(rng.random(length) < 0.3) for length in lengths],
    }
    tokens = {uid: sum(r.sum() for u, r in zip(data["uid"], masks, strict=True) if u == uid) for uid in data["uid"]}
    extra["prompt_weights"] = [row / tokens[uid] for uid, row in zip(data["uid"], masks, strict=True)]
    extra["observation_mask"] = [rng.random(length) < 0.3 for length in lengths]
    columns = {name: Ragged.from_rows(rows, torch.float32) for name, rows in extra.items()}
    return data.union(DataProto.from_dict(columns))


def train(rank: int, path: str, shards: list[list[int]], micro_batch_size: int, sharding: dict) -> dict:
    """Two optimizer steps per aggregation mode on this rank's rows; returns metrics and final weights."""
    out = {}
    data = batch().index(shards[rank])
    for mode, changes in OBJECTIVES.items():
        engine = trainable_engine(path, **sharding)
        # plain SGD: Adam divides by the size of the gradient, which turns rounding of near-zero ones into real steps
        engine.reference_head = engine.output_layer("cpu")
        engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
        settings, limits = objective(loss_agg_mode=mode, **changes), PassLimits("", micro_batch_size)
        steps = [engine.train_mini_batch(data, settings, limits).metrics for _ in range(2)]
        log_probs = engine.compute_log_probs(data, limits).values.numpy()
        out[mode] = steps, {k: v.clone().numpy() for k, v in engine.full_parameters("float32")}, log_probs
    return out


# The rows of each rank, sequences of a micro-batch, and how the model is held.
ALL = list(range(16))
PLAIN = "1 rank x 1 micro-batch"
LAYOUTS: dict[str, tuple[list[list[int]], int, dict[str, Any]]] = {
    "1 rank x 8 micro-batches": ([ALL], 2, {}),
    "2 ranks x 1 micro-batch": ([ALL[0::2], ALL[1::2]], 8, {}),
    "2 ranks, uneven, one idle at times": ([ALL[:13], ALL[13:]], 3, {}),
    "2 ranks with a copy each": ([ALL[:9], ALL[9:]], 4, {"fsdp_size": 1}),
    "2 ranks that reduce at the end": ([ALL[:9], ALL[9:]], 2, {"defer_grad_sync": True}),
    "4 ranks with two copies": ([ALL[i::4] for i in range(4)], 1, {"fsdp_size": 2}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """What each rank of each layout returned."""
    path = random_qwen3(tmp_path_factory.mktemp("model"))
    every = {PLAIN: ([ALL], 16, {}), **LAYOUTS}
    return {name: run_ranks(len(shards), train, path, shards, *rest) for name, (shards, *rest) in every.items()}


@pytest.mark.parametrize(("layout", "mode"), covering(LAYOUTS, MODES))
def test_same_loss_metrics_and_weights(runs: dict, layout: str, mode: str) -> None:
    (plain,), ranks = runs[PLAIN], runs[layout]
    for step in range(2):
        expected = metric_values(plain[mode][0][step])
        merged = metric_values(merge_metrics([rank[mode][0][step] for rank in ranks]))
        assert merged.keys() == expected.keys()
        for name, value in expected.items():
            assert merged[name] == pytest.approx(value, rel=5e-5, abs=1e-6), (layout, mode, step, name)
    for name, weight in plain[mode][1].items():
        np.testing.assert_allclose(
            ranks[0][mode][1][name], weight, rtol=1e-4, atol=1e-5, err_msg=f"{layout} {mode} {name}"
        )


@pytest.mark.parametrize("mode", MODES)
def test_training_changed_the_weights(runs: dict, mode: str) -> None:
    (plain,) = runs[PLAIN]
    other = "token-mean" if mode == "seq-mean-token-mean" else "seq-mean-token-mean"
    assert 0 < metric_values(plain["seq-mean-token-sum"][0][0])["actor/off_policy_masked_fraction"] < 1
    changed = [np.abs(plain[mode][1][name] - plain[other][1][name]).max() for name in plain[mode][1]]
    assert max(changed) > 1e-3, "two aggregation modes gave the same weights: the comparison above proves nothing"


def test_log_probs_agree_across_layouts(runs: dict) -> None:
    (plain,), (cut,) = runs[PLAIN], runs["1 rank x 8 micro-batches"]
    np.testing.assert_allclose(cut["token-mean"][2], plain["token-mean"][2], rtol=1e-4, atol=1e-4)
