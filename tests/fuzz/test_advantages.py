"""Advantage estimators and rollout correction against the papers' formulas, row by row and token by token."""

from operator import add, sub
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.papers import Rows, by_token
from conformance.papers.advantages import ESTIMATORS, Batch
from conformance.papers.corrections import importance_weights, kept, kpop_kept, m2po_kept, normalised, opsm_kept
from grpo_dist.algorithms import compute_advantage, compute_rollout_correction
from grpo_dist.algorithms.correction import LEVELS, REJECTIONS, off_policy_mask, second_moment_mask
from tests.fuzz.batches import NAN, Shape, assert_near, decided, shapes
from tests.golden import cases, tensors

# Whitening divides by a spread of 0.1 and more.
WHITENED = 10.0
NOT_VERLS = {"gdpo", "grpo_process", "distill", "maxrl", "lite_ppo", "scale_rl", "rl_zvp", "rae", "gigpo"}
NOT_VERLS |= {"optimal_token_baseline", "a2po"}

OPTIONS = st.fixed_dictionaries({
    "norm_adv_by_std_in_grpo": st.booleans(), "gamma": st.sampled_from([1.0, 0.97, 0.5]),
    "lam": st.sampled_from([1.0, 0.95, 0.5]), "f_norm": st.sampled_from([1.0, 2.0]),
    "zvp_alpha": st.sampled_from([0.1, 1.0]), "step_advantage_w": st.sampled_from([1.0, 0.5]),
    "a2po_beta": st.sampled_from([0.5, 2.0]), "agent_baselines": st.sampled_from([{0: 0.25}, {0: 0.0, 7: 1.0}]),
    "gdpo_reward_weights": st.sampled_from([(3.0, 0.5), (1.0, -1.0), (1.0, 1.0)]),
})  # fmt: skip


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Rewards on every token or on one, on the mask or off it; up to 3 groups, mostly of unequal size."""
    shape = draw(shapes())
    rewards = draw(shape.on_grid(-16, 16, 8) | shape.on_grid(0, 1, 1))
    if draw(st.booleans()):
        place = draw(st.integers(0, shape.columns - 1))
        rewards = [[r if t == place else 0.0 for t, r in enumerate(row)] for row in rewards]
    column = {"min_size": shape.rows, "max_size": shape.rows}
    small = st.lists(st.integers(-8, 8).map(lambda number: number / 8), **column)
    partly = st.lists(st.none() | st.integers(-8, 8), **column)
    second = [NAN if number is None else number / 8 for number in draw(partly)]
    labels = st.sampled_from(draw(st.sampled_from(["aab", "abc", "a"])))
    grids = dict.fromkeys(("entropies", "norms"), (0, 16, 8)) | {"values": (-16, 16, 8), "states": (0, 2, 1)}
    return Batch(
        rewards,
        shape.masks,
        draw(st.lists(labels, **column)),
        **{name: draw(shape.on_grid(*grid)) for name, grid in grids.items()},
        steps=draw(shape.on_grid(0, 1, 1)),
        baselines=draw(small),
        components={"first": draw(small), "second": second},
    )


@pytest.mark.parametrize("case", cases("advantage", tuple(set(ESTIMATORS) - NOT_VERLS)))
def test_numbers_are_verls(case: dict) -> None:
    """Off the mask they are 0; verl's gae leaves whitened values there, which no loss reads."""
    inputs = tensors(case["inputs"])
    found = compute_advantage(case["name"], **inputs, config=case["config"])
    for ours, name in zip(found, ("advantages", "returns"), strict=True):
        verls = torch.tensor(case["outputs"][name]) * inputs["response_mask"]
        torch.testing.assert_close(ours, verls, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(batch=batches(), options=OPTIONS)
def test_estimators(name: str, batch: Batch, options: dict) -> None:
    with decided():
        expected = ESTIMATORS[name](batch, options)
    rows = {"token_level_rewards": batch.rewards, "response_mask": batch.masks, "values": batch.values}
    rows |= {"entropies": batch.entropies, "gradient_norms": batch.norms, "step_mask": batch.steps}
    columns: dict[str, Any] = {column: torch.tensor(values) for column, values in rows.items()}
    columns |= {"turn_states": torch.tensor(batch.states).long(), "reward_baselines": torch.tensor(batch.baselines)}
    columns["reward_components"] = {key: torch.tensor(scores) for key, scores in batch.components.items()}
    found = compute_advantage(name, **columns, index=batch.index, config=options)
    for ours, papers in zip(found, expected, strict=True):
        assert_near(ours, papers, scale=WHITENED)


# --- rollout correction ----------------------------------------------------------------------------------------------
BOUNDS = st.sampled_from([(None, 1.3), (None, 2.0), (None, 5.0), (0.5, 2.0), (0.7, 1.2), (0.1, 7.0)])


def text(bounds: tuple[float | None, float]) -> str:
    lower, upper = bounds
    return str(upper) if lower is None else f"{lower}_{upper}"


@st.composite
def two_policies(draw: st.DrawFn) -> tuple[Shape, Rows, Rows]:
    """(shape, log-probs of the trainer's policy, of the sampler)."""
    shape = draw(shapes())
    rollout, change = draw(shape.on_grid(-80, -40, 16)), draw(shape.on_grid(-32, 32, 16) | shape.on_grid(-4, 4, 16))
    return shape, by_token(add, rollout, change), rollout


def columns(shape: Shape, old: Rows, rollout: Rows) -> dict[str, torch.Tensor]:
    hidden = {"old_log_probs": shape.hide(old), "rollout_log_probs": shape.hide(rollout)}
    return hidden | {"response_mask": shape.mask}


@pytest.mark.parametrize("level", LEVELS)
@given(policies=two_policies(), bounds=BOUNDS, normalise=st.booleans())
def test_importance_weights(
    level: str, policies: tuple[Shape, Rows, Rows], bounds: tuple[float | None, float], normalise: bool
) -> None:
    shape, old, rollout = policies
    with decided():
        expected = importance_weights(by_token(sub, old, rollout), shape.masks, level, *bounds)
    if normalise:
        expected = normalised(expected, level)
    options: dict[str, Any] = {"rollout_is_threshold": text(bounds), "rollout_is_batch_normalize": normalise}
    weights, mask, _ = compute_rollout_correction(**columns(*policies), rollout_is=level, **options)
    assert weights is not None
    assert_near(weights, shape.in_place(expected, 1.0))
    assert mask.tolist() == shape.masks, "weights leave the mask alone"


@pytest.mark.parametrize("name", REJECTIONS)
@given(policies=two_policies(), bounds=BOUNDS, second=st.sampled_from([None, *REJECTIONS]))
def test_rejection(
    name: str, policies: tuple[Shape, Rows, Rows], bounds: tuple[float | None, float], second: str | None
) -> None:
    shape, old, rollout = policies
    scale = {"k1": bounds, "kpop": (None, bounds[1] / 20)}  # whose divergences are small
    criteria = [(key, scale.get(key.split("_")[-1], (None, bounds[1]))) for key in (name, second) if key]
    rows = shape.trained(old, rollout)

    def stay(p: list[float], q: list[float], key: str, limits: tuple[float | None, float]) -> list[bool]:
        differences = [a - b for a, b in zip(p, q, strict=True)]
        return kpop_kept(p, q, limits[1]) if key == "token_kpop" else kept(differences, key, *limits)

    with decided():
        answers = [[stay(*row, *criterion) for criterion in criteria] for row in rows]
    expected = [[all(token) for token in zip(*row, strict=True)] for row in answers]
    keys, limits = zip(*criteria, strict=True)
    options: dict[str, Any] = {"rollout_rs": ",".join(keys), "rollout_rs_threshold": ",".join(map(text, limits))}
    weights, mask, metrics = compute_rollout_correction(**columns(*policies), **options)
    assert weights is None
    assert mask.tolist() == shape.in_place(expected, 0.0)
    tokens = shape.counts["global_tokens"]
    gone = 1 - sum(map(sum, expected)) / tokens if tokens else 0
    assert_near(torch.tensor(metrics["rollout_corr/rollout_rs_masked_fraction"]), gone)


@given(data=st.data(), policies=two_policies(), threshold=st.sampled_from([0.01, 0.04, 0.2, 1.0]))
def test_second_moment_of_a_batch(data: st.DataObject, policies: tuple[Shape, Rows, Rows], threshold: float) -> None:
    """And of the batch with its rows in another order."""
    shape, old, rollout = policies
    advantages = data.draw(shape.on_grid(-4, 4, 4))
    order = data.draw(st.permutations(range(shape.rows)))
    rows = shape.trained(by_token(sub, old, rollout), advantages)
    flat = [[value for row in rows for value in row[column]] for column in (0, 1)]
    with decided():
        expected = shape.in_place([m2po_kept(*flat, threshold)], 1.0)
    batch = columns(*policies) | {"advantages": shape.hide(advantages)}
    assert second_moment_mask(**batch, threshold=threshold).tolist() == expected
    moved = {name: values[list(order)] for name, values in batch.items()}
    assert second_moment_mask(**moved, threshold=threshold).tolist() == [expected[i] for i in order]


@given(data=st.data(), policies=two_policies(), delta=st.sampled_from([0.01, 0.1, 0.5]))
def test_off_policy_sequences(data: st.DataObject, policies: tuple[Shape, Rows, Rows], delta: float) -> None:
    shape, new, rollout = policies
    advantages = data.draw(shape.on_grid(-4, 4, 4))
    rows = shape.trained(rollout, new, advantages)
    with decided():
        expected = [opsm_kept(*row, delta) for row in rows]
    batch = columns(*policies) | {"advantages": shape.hide(advantages)}
    found = off_policy_mask(batch.pop("old_log_probs"), **batch, threshold=delta)
    assert found.tolist() == shape.in_place(expected, 1.0)
