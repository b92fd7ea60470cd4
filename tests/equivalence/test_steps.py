"""A step is the same with log-probs of its own, whatever an environment's columns hold, and without failed scores."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.correction import compute_rollout_correction
from grpo_dist.algorithms.settings import TargetSettings
from grpo_dist.algorithms.targets import compute_targets
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.protocol import DataProto, Ragged, merge_metrics, metric_values
from tests.engines.train.plain import weights, with_sgd
from tests.models import VOCAB, objective, random_batch, random_qwen3
from tests.ranks import run_ranks
from tests.tiers import first


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_qwen3(tmp_path_factory.mktemp("model"))


def plain_engine(path: str, layout: str = "shared") -> FSDPEngine:
    engine = with_sgd(path, 0.1, 0.7, layout=layout)
    engine.grad_clip = 1.0
    return engine


def assert_same_weights(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], **tolerance: float) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, err_msg=name, **tolerance)


def changed(data: DataProto, columns: dict[str, Ragged]) -> DataProto:
    return data.pop(tuple(columns))[1].union(DataProto(columns))


# --- old log-probs, and weights against the sampler, from the update itself ----------------------------------------
LIMITS = PassLimits("", 4)


def both_ways(rank: int, path: str, rollout_is: str | None) -> dict[str, Any]:
    data = random_batch(num_groups=3, n=4)
    options = {"rollout_is": rollout_is, "rollout_is_threshold": 1.1}
    sampler = DataProto({"rollout_log_probs": data["old_log_probs"]})
    data = data.pop(("old_log_probs",))[1].union(sampler)
    out: dict[str, Any] = {}
    for own in (False, True):
        engine, batch = plain_engine(path), data
        if not own:
            batch = data.union(DataProto({"old_log_probs": engine.compute_log_probs(data, LIMITS)}))
            batch = batch.union(DataProto({"rollout_is_weights": importance_weights(batch, options)}))
        correction = options if own and rollout_is else None
        loss = objective(on_policy=own, weighted=not own, correction=correction)
        result = engine.train_mini_batch(batch, loss, LIMITS)
        old = result.log_probs if own else batch["old_log_probs"]
        out["update" if own else "before"] = old.values.numpy(), metric_values(result.metrics), weights(engine)
    return out


def importance_weights(batch: DataProto, options: dict[str, Any]) -> Ragged:
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    columns = {name: batch[name].to_padded(0) for name in names}
    found, _, _ = compute_rollout_correction(**columns, **options)
    found = torch.ones_like(columns["old_log_probs"]) if found is None else found
    return Ragged.from_padded(found, batch["responses"].lengths)


@pytest.mark.parametrize("rollout_is", first([None, "token", "sequence"], "token"))
def test_log_probs_of_the_update_itself_change_nothing(path: str, rollout_is: str | None) -> None:
    (ways,) = run_ranks(1, both_ways, path, rollout_is)
    (before, expected, left), (update, metrics, own) = ways["before"], ways["update"]
    np.testing.assert_allclose(update, before, atol=2e-6)
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert_same_weights(own, left, atol=1e-6)
    assert metrics["actor/ppo_kl"] == 0, "the ratio is exactly one"


# --- what an environment put into a response -----------------------------------------------------------------------
LAYOUTS = ("shared", "packed", "padded")


def with_environment(data: DataProto, noise: float) -> DataProto:
    """Every second response gets three tokens put in behind its first one; their columns hold `noise`."""
    columns: dict[str, Ragged] = {}
    for name in ("responses", "response_mask", "old_log_probs", "ref_log_probs", "advantages"):
        fill = {"responses": 7.0, "response_mask": 0.0}.get(name, noise)
        rows = [row.tolist() for row in data[name].rows()]
        rows = [[*row[:1], *[fill] * 3, *row[1:]] if i % 2 else row for i, row in enumerate(rows)]
        columns[name] = Ragged.from_rows(rows, data[name].values.dtype)
    return changed(data, columns)


def one_step(path: str, data: DataProto, layout: str, **changes: object) -> tuple[dict[str, Any], dict[str, float]]:
    engine = plain_engine(path, layout)
    result = engine.train_mini_batch(data, objective(**changes), LIMITS)
    return weights(engine), metric_values(result.metrics)


def all_steps(rank: int, path: str) -> dict[Any, Any]:
    data, out = random_batch(num_groups=3, n=4), {}
    for layout, on_policy, noise in product(LAYOUTS, (False, True), (0.0, 50.0)):
        step = one_step(path, with_environment(data, noise), layout, on_policy=on_policy)
        out[layout, on_policy, noise] = step
    other = with_environment(data, 0.0)
    ids = other["responses"].values.clone()
    ids[other["response_mask"].values == 0] = VOCAB - 1
    swapped = changed(other, {"responses": Ragged(ids, other["responses"].offsets)})
    return out | {"other words": one_step(path, swapped, "shared", on_policy=False)}


def test_what_an_environment_put_in_is_read_and_neither_trains_nor_counts(path: str) -> None:
    (steps,) = run_ranks(1, all_steps, path)
    shared, metrics = steps["shared", False, 0.0]
    for layout in LAYOUTS:
        for on_policy in (False, True):
            (quiet, plain), (noisy, other) = (steps[layout, on_policy, noise] for noise in (0.0, 50.0))
            assert other == plain, (layout, on_policy)
            assert_same_weights(noisy, quiet, rtol=0, atol=0)
        own, found = steps[layout, False, 0.0]
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6), layout
        assert_same_weights(own, shared, atol=1e-5)
    assert steps["other words"][1]["actor/loss"] != metrics["actor/loss"]


# --- responses that could not be scored ----------------------------------------------------------------------------
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
    columns = {name: data[name].to_padded(0.0) for name in ("response_mask", "old_log_probs")}
    columns |= {
        "rollout_log_probs": columns["old_log_probs"],
        "token_level_scores": torch.zeros(12, int(lengths.max())),
    }
    columns["token_level_scores"][torch.arange(12), lengths - 1] = scores
    rows = {"index": data["uid"], "truncated": torch.zeros(12), "scored": ~scores.isnan()}
    out, _ = compute_targets(columns, TargetSettings("grpo"), **rows)
    return changed(data, {name: Ragged.from_padded(out[name], lengths) for name in ("advantages", "response_mask")})


def by_mode(rank: int, path: str, data: DataProto, shards: list[list[int]], size: int, layout: str) -> dict[str, Any]:
    out = {}
    for mode in MODES:
        engine = plain_engine(path, layout)
        settings = objective(loss_agg_mode=mode, loss_scale_factor=12.0)
        result = engine.train_mini_batch(data.index(shards[rank]), settings, PassLimits("", size))
        out[mode] = result.metrics, weights(engine)
    return out


@pytest.fixture(scope="module")
def without(path: str) -> dict[str, Any]:
    return run_ranks(1, by_mode, path, scored_batch().index(LEFT), [list(range(len(LEFT)))], 12, "shared")[0]


@pytest.mark.deep
@pytest.mark.parametrize("cut", CUTS)
def test_a_step_with_failed_responses_is_that_of_the_others(path: str, without: dict[str, Any], cut: str) -> None:
    shards, size, layout = CUTS[cut]
    ranks = run_ranks(len(shards), by_mode, path, scored_batch(), shards, size, layout)
    for mode in MODES:
        expected, left = without[mode]
        found = metric_values(merge_metrics([rank[mode][0] for rank in ranks]))
        assert found == pytest.approx(metric_values(expected), rel=1e-4, abs=1e-6), mode
        assert_same_weights(ranks[0][mode][1], left, rtol=1e-4, atol=1e-5)
