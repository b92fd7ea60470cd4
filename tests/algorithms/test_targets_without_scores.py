"""Responses that could not be scored: their group is compared without them, and they train nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_dist.algorithms.settings import TargetSettings
from grpo_dist.algorithms.targets import compute_targets
from grpo_dist.plugins.names import ADV_ESTIMATORS, SCORELESS_ADV_ESTIMATORS

NAN = torch.nan
# Group a: -3, none, -2, -1; group b: none, 5; group c: none, none. Three tokens each, the score on the last one.
SCORES = torch.tensor([-3.0, NAN, -2, -1, NAN, 5, NAN, NAN])
INDEX = ["a", "a", "a", "a", "b", "b", "c", "c"]
N, T = len(SCORES), 3
BY_SCORE = sorted(set(ADV_ESTIMATORS) - set(SCORELESS_ADV_ESTIMATORS))
PLAIN = {"norm_adv_by_std_in_grpo": False}


def columns(scores: torch.Tensor = SCORES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "old_entropies", "values")
    found = {name: torch.rand(N, T, generator=generator) for name in names}
    mask = torch.ones(N, T, dtype=torch.int8)
    mask[0, 1] = 0  # an environment's word
    at_end = torch.zeros(N, T)
    at_end[:, -1] = scores
    steps = torch.tensor([[0, 0, 1]] * N)
    found |= {"old_gradient_norms": found["old_entropies"], "responses": torch.arange(N * T).reshape(N, T) // 7}
    return found | {"token_level_scores": at_end, "response_mask": mask, "step_mask": steps}


def targets(
    scores: torch.Tensor, settings: TargetSettings, rows: list[int] | None = None, **more: Any
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Of the batch, or of these rows alone."""
    rows = list(range(N)) if rows is None else rows
    batch = {name: values[rows] for name, values in columns(scores).items()}
    return compute_targets(
        batch,
        settings,
        index=[INDEX[row] for row in rows],
        truncated=torch.zeros(len(rows)),
        scored=~scores[rows].isnan(),
        kl_coef=0.1,
        generator=torch.Generator().manual_seed(1),
        **more,
    )


@pytest.mark.parametrize(
    ("estimator", "options", "expected"),
    [
        # mean -2, standard deviation 1; the 5 is alone in its group
        ("grpo", {}, [-1, 0, 0, 1, 0, 0, 0, 0]),
        ("grpo", PLAIN, [-1, 0, 0, 1, 0, 0, 0, 0]),
        ("grpo_process", PLAIN, [-1, 0, 0, 1, 0, 0, 0, 0]),
        ("grpo_passk", PLAIN, [0, 0, 0, 1, 0, 0, 0, 0]),
        ("rloo", {}, [-3 + 1.5, 0, 0, -1 + 2.5, 0, 0, 0, 0]),
        # lengths 2, 3, 3: baseline (-6 - 6 - 3) / 8
        ("opo", {}, [-3 + 15 / 8, 0, -2 + 15 / 8, -1 + 15 / 8, 0, 0, 0, 0]),
        ("gpg", {}, [-1, 0, 0, 1, 0, 0, 0, 0]),
        # the greedy response to b failed
        ("remax", {}, [-3 - 0.5, 0, -2 - 0.5, -1 - 0.5, 0, 0, 0, 0]),
    ],
)
def test_by_hand(estimator: str, options: dict[str, Any], expected: list[float]) -> None:
    more: dict[str, Any] = {}
    if estimator == "remax":
        more["reward_baselines"] = torch.tensor([0.5, 0.5, 0.5, 0.5, NAN, NAN, 0.5, 0.5])
    out, _ = targets(SCORES, TargetSettings(estimator, options, old_log_probs_from="rollout"), **more)
    mask = columns()["response_mask"].float()
    torch.testing.assert_close(out["advantages"], torch.tensor(expected)[:, None] * mask, rtol=0, atol=5e-6)
    trains = [True, False, True, True, False, estimator != "remax", False, False]
    assert torch.equal(out["response_mask"], mask * torch.tensor(trains)[:, None])


@pytest.mark.parametrize("estimator", BY_SCORE)
def test_everything_is_as_if_they_had_not_been_sampled(estimator: str) -> None:
    """Bit for bit, with all that comes between scores and loss; and the metrics too."""
    settings = TargetSettings(
        estimator,
        {"gamma": 0.9, "lam": 0.95},
        kl_penalty="k1",
        rollout_correction={"rollout_is": "sequence", "rollout_is_batch_normalize": True},
        top_entropy_quantile=0.6,
        loss_mode="kl_cov",
        loss_options={"kl_cov_ratio": 0.3},
        has_values=estimator == "gae",
    )
    left = [0, 2, 3, 5]
    components = torch.tensor([1.0, NAN, 0, 3, NAN, 2, NAN, NAN])
    more = {"reward_baselines": torch.full((N,), 0.5), "reward_components": {"right": components}}
    scores = SCORES + 4 if estimator == "maxrl" else SCORES  # which learns from positive means alone
    out, metrics = targets(scores, settings, **more)
    part = {"reward_baselines": torch.full((4,), 0.5), "reward_components": {"right": components[left]}}
    alone, expected = targets(scores, settings, left, **part)
    assert metrics == expected
    assert out.keys() == alone.keys()
    assert alone["advantages"].any()
    gone = SCORES.isnan()
    for name, values in out.items():
        assert torch.equal(values[left], alone[name].float()), name
        if name != "token_level_rewards":
            assert not values[gone].any(), name
    assert out["token_level_rewards"][gone].sum(-1).isnan().all(), "they have no reward"


@pytest.mark.parametrize("estimator", BY_SCORE)
def test_where_all_have_failed_nothing_trains(estimator: str) -> None:
    more = {"reward_baselines": torch.full((N,), NAN), "reward_components": {"right": torch.full((N,), NAN)}}
    settings = TargetSettings(estimator, kl_penalty="k1", top_entropy_quantile=0.6)
    out, metrics = targets(torch.full((N,), NAN), settings, **more)
    for name in ("response_mask", "advantages", "returns"):
        assert not out[name].any(), name
    assert not any(name.startswith(("critic/", "rae/")) for name in metrics), "nothing moves a baseline"
    assert torch.tensor(list(metrics.values())).isfinite().all()


def test_where_scores_do_not_train_a_response_needs_none() -> None:
    out, _ = targets(SCORES, TargetSettings("distill", {"gamma": 0.0}, kl_penalty="k1"))
    assert torch.equal(out["response_mask"], columns()["response_mask"].float())
    assert out["advantages"][SCORES.isnan()].any()


def test_a_batch_with_all_scores_is_as_before() -> None:
    scores = torch.arange(8.0)
    settings = TargetSettings("grpo", kl_penalty="k1")
    out, metrics = targets(scores, settings)
    expected, its_metrics = compute_targets(
        columns(scores), settings, index=INDEX, truncated=torch.zeros(N), kl_coef=0.1
    )
    assert metrics == its_metrics
    assert all(torch.equal(out[name], values) for name, values in expected.items())
