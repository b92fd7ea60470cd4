"""Advantage estimators against the papers' formulas, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_dist.algorithms import compute_advantage
from grpo_dist.algorithms.advantage import ADVANTAGE, DEFAULTS
from tests.fuzz.batches import NAN, assert_near, decided, shapes
from tests.fuzz.papers.advantages import ESTIMATORS, Batch
from tests.golden import cases

# Whitening divides by a spread of 0.1 and more.
WHITENED = 10.0
# The goldens have none of these; tests/algorithms/test_advantage.py has numbers worked out on paper.
BY_HAND = {"gdpo", "grpo_process", "distill", "maxrl", "lite_ppo", "scale_rl", "rl_zvp", "rae", "gigpo"}
BY_HAND |= {"optimal_token_baseline", "a2po"}

OPTIONS = st.fixed_dictionaries(
    {
        "norm_adv_by_std_in_grpo": st.booleans(),
        "gamma": st.sampled_from([1.0, 0.97, 0.5]),
        "lam": st.sampled_from([1.0, 0.95, 0.5]),
        "f_norm": st.sampled_from([1.0, 2.0]),
        "zvp_alpha": st.sampled_from([0.1, 1.0]),
        "step_advantage_w": st.sampled_from([1.0, 0.5]),
        "a2po_beta": st.sampled_from([0.5, 2.0]),
        "agent_baselines": st.sampled_from([{0: 0.25}, {0: 0.0, 7: 1.0}]),
        "gdpo_reward_weights": st.sampled_from([(3.0, 0.5), (1.0, -1.0), (1.0, 1.0)]),
    }
)


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
    partly = st.lists(st.none() | st.integers(-8, 8), **column).map(
        lambda row: [NAN if n is None else n / 8 for n in row]
    )
    return Batch(
        rewards=rewards,
        masks=shape.masks,
        index=draw(
            st.sampled_from(["aab", "abc", "a"]).flatmap(lambda labels: st.lists(st.sampled_from(labels), **column))
        ),
        values=draw(shape.on_grid(-16, 16, 8)),
        entropies=draw(shape.on_grid(0, 16, 8)),
        norms=draw(shape.on_grid(0, 16, 8)),
        states=draw(shape.on_grid(0, 2, 1)),
        baselines=draw(small),
        steps=draw(shape.on_grid(0, 1, 1)),
        components={"first": draw(small), "second": draw(partly)},
    )


def test_every_estimator_has_a_formula() -> None:
    assert set(ESTIMATORS) == set(ADVANTAGE.names())


@pytest.mark.parametrize("case", cases("advantage", tuple(set(ESTIMATORS) - BY_HAND)))
def test_the_formulas_give_verls_numbers(case: dict) -> None:
    inputs = case["inputs"]
    batch = Batch(
        rewards=inputs["token_level_rewards"],
        masks=inputs["response_mask"],
        index=inputs.get("index", []),
        values=inputs.get("values", []),
        baselines=inputs.get("reward_baselines", []),
    )
    found = ESTIMATORS[case["name"]](batch, DEFAULTS | case["config"])
    for ours, name in zip(found, ("advantages", "returns"), strict=True):
        verls = torch.tensor(case["outputs"][name]) * torch.tensor(batch.masks)
        assert_near(verls, ours, scale=WHITENED)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(batch=batches(), options=OPTIONS)
def test_estimators(name: str, batch: Batch, options: dict) -> None:
    with decided():
        expected = ESTIMATORS[name](batch, options)
    found = compute_advantage(
        name,
        token_level_rewards=torch.tensor(batch.rewards),
        response_mask=torch.tensor(batch.masks),
        index=batch.index,
        values=torch.tensor(batch.values),
        entropies=torch.tensor(batch.entropies),
        gradient_norms=torch.tensor(batch.norms),
        turn_states=torch.tensor(batch.states).long(),
        reward_baselines=torch.tensor(batch.baselines),
        step_mask=torch.tensor(batch.steps),
        reward_components={key: torch.tensor(scores) for key, scores in batch.components.items()},
        config=options,
    )
    for ours, papers in zip(found, expected, strict=True):
        assert_near(ours, papers, scale=WHITENED)
