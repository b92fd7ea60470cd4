"""Loss and updated weights do not depend on micro-batch size or rank count. Test number one."""

from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.engines.settings import PassLimits
from grpo_dist.protocol import DataProto, Ragged, merge_metrics, metric_values
from tests.engines.train.plain import weights, with_sgd
from tests.models import objective, random_batch, random_qwen3
from tests.ranks import run_ranks

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
    tokens = {uid: sum(r.sum() for u, r in zip(data["uid"], masks, strict=True) if u == uid) for uid in data["uid"]}
    extra = {
        "ref_hidden_states": [rng.normal(size=(length, HIDDEN)) for length in lengths],
        "rollout_is_weights": [rng.uniform(0.5, 2, length) for length in lengths],
        "rollout_log_probs": [-4.5 + 0.2 * rng.normal(size=length) for length in lengths],
        "selected_tokens": [rng.random(length) < 0.3 for length in lengths],
        "prompt_weights": [row / tokens[uid] for uid, row in zip(data["uid"], masks, strict=True)],
        "observation_mask": [rng.random(length) < 0.3 for length in lengths],
    }
    columns = {name: Ragged.from_rows(rows, torch.float32) for name, rows in extra.items()}
    return data.union(DataProto.from_dict(columns))


def train(rank: int, path: str, modes: tuple[str, ...], shards: list[list[int]], size: int, sharding: dict) -> dict:
    """Two optimizer steps per aggregation mode on this rank's rows; returns metrics and final weights."""
    out = {}
    data = batch().index(shards[rank])
    for mode in modes:
        engine = with_sgd(path, 0.1, 0.7, **sharding)
        engine.grad_clip, engine.reference_head = 1.0, engine.output_layer("cpu")
        settings, limits = objective(loss_agg_mode=mode, **OBJECTIVES[mode]), PassLimits("", size)
        steps = [engine.train_mini_batch(data, settings, limits).metrics for _ in range(2)]
        log_probs = engine.compute_log_probs(data, limits).values.numpy()
        out[mode] = steps, weights(engine), log_probs
    return out


# The rows of each rank, sequences of a micro-batch, and how the model is held.
ALL = list(range(16))
LAYOUTS: dict[str, tuple[list[list[int]], int, dict[str, Any]]] = {
    "1 rank x 8 micro-batches": ([ALL], 2, {}),
    "2 ranks x 1 micro-batch": ([ALL[0::2], ALL[1::2]], 8, {}),
    "2 ranks, uneven, one idle at times": ([ALL[:13], ALL[13:]], 3, {}),
    "2 ranks with a copy each": ([ALL[:9], ALL[9:]], 4, {"fsdp_size": 1}),
    "2 ranks that reduce at the end": ([ALL[:9], ALL[9:]], 2, {"defer_grad_sync": True}),
    "4 ranks with two copies": ([ALL[i::4] for i in range(4)], 1, {"fsdp_size": 2}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(path: str) -> dict[str, Any]:
    return run_ranks(1, train, path, MODES, [ALL], 16, {})[0]


def check_layout(plain: dict, path: str, layout: str, modes: tuple[str, ...]) -> None:
    """The same loss, metrics, weights and log-probs."""
    shards, *rest = LAYOUTS[layout]
    ranks = run_ranks(len(shards), train, path, modes, shards, *rest)
    for mode in modes:
        steps, left, log_probs = plain[mode]
        for step, expected in enumerate(map(metric_values, steps)):
            merged = metric_values(merge_metrics([rank[mode][0][step] for rank in ranks]))
            assert merged.keys() == expected.keys()
            for name, value in expected.items():
                assert merged[name] == pytest.approx(value, rel=5e-5, abs=1e-6), (mode, step, name)
        for name, weight in left.items():
            np.testing.assert_allclose(ranks[0][mode][1][name], weight, rtol=1e-4, atol=1e-5, err_msg=f"{mode} {name}")
        if len(ranks) == 1:
            np.testing.assert_allclose(ranks[0][mode][2], log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("layout", "mode"), list(zip(LAYOUTS, MODES, strict=True)))
def test_each_layout_gives_the_same(plain: dict, path: str, layout: str, mode: str) -> None:
    check_layout(plain, path, layout, (mode,))


@pytest.mark.deep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_the_same_in_every_mode(plain: dict, path: str, layout: str) -> None:
    check_layout(plain, path, layout, MODES)


@pytest.mark.parametrize("mode", MODES)
def test_training_changed_the_weights(plain: dict, mode: str) -> None:
    other = "token-mean" if mode == "seq-mean-token-mean" else "seq-mean-token-mean"
    assert 0 < metric_values(plain["seq-mean-token-sum"][0][0])["actor/off_policy_masked_fraction"] < 1
    changed = [np.abs(plain[mode][1][name] - plain[other][1][name]).max() for name in plain[mode][1]]
    assert max(changed) > 1e-3, "two aggregation modes gave the same weights: the comparison above proves nothing"
