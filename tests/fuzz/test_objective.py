"""KL estimators, the objective of all three terms and the value loss against the papers' formulas."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_dist.algorithms import compute_value_loss, kl_penalty, policy_objective
from grpo_dist.algorithms.aggregate import LOSS_AGG_MODES
from grpo_dist.algorithms.kl import KL
from tests.fuzz.batches import (
    FEW,
    Batch,
    Shape,
    assert_near,
    batches,
    check_in_parts,
    cuts,
    decided,
    derivative,
    shapes,
    slopes,
)
from tests.fuzz.papers import Rows, masked
from tests.fuzz.papers.aggregates import AGGREGATES
from tests.fuzz.papers.corrections import importance_weights, kept, opsm_kept
from tests.fuzz.papers.kl import ESTIMATORS, Estimator, full, unbiased_k3
from tests.fuzz.papers.policy_losses import vanilla
from tests.fuzz.papers.value_loss import value_error
from tests.golden import cases
from tests.worker_settings import objective_settings


def test_every_kl_estimator_has_a_formula() -> None:
    assert {name for name in ESTIMATORS if not name.endswith("+")} == set(KL.names()) - {"full", "unbiased_k3"}


@pytest.mark.parametrize("case", cases("kl", ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+")))
def test_the_formulas_give_verls_kl(case: dict) -> None:
    value, sloped = ESTIMATORS[case["name"]]
    rows = list(zip(case["inputs"]["log_prob"], case["inputs"]["ref_log_prob"], strict=True))
    found = [[value(p, q) for p, q in zip(*row, strict=True)] for row in rows]
    assert_near(torch.tensor(case["outputs"]["kl"]), found)
    if "grad" in case["outputs"]:
        slope = [[derivative(lambda p, q=q: sloped(p, q), p) for p, q in zip(*row, strict=True)] for row in rows]
        assert_near(torch.tensor(case["outputs"]["grad"]), slope)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(data=st.data(), shape=shapes())
def test_kl_estimators(name: str, data: st.DataObject, shape: Shape) -> None:
    """Distances up to 25: k3's value is bounded from e^2.5 on."""
    value, sloped = ESTIMATORS[name]
    p, q = data.draw(shape.on_grid(-48, -1, 16)), data.draw(shape.on_grid(-400, -1, 16) | shape.on_grid(-48, -1, 16))
    pairs = [list(zip(*rows, strict=True)) for rows in zip(p, q, strict=True)]
    with decided():
        expected = [[value(*pair) for pair in row] for row in pairs]
        gradient = [[derivative(lambda x, b=b: sloped(x, b), a) for a, b in row] for row in pairs]
    log_probs = torch.tensor(p, requires_grad=True)
    found = kl_penalty(name, log_probs, torch.tensor(q))
    found.sum().backward()
    assert_near(found, expected)
    assert log_probs.grad is not None
    assert_near(log_probs.grad, gradient)


@given(data=st.data(), batch=batches(), mode=st.sampled_from(LOSS_AGG_MODES))
def test_the_unbiased_kl_of_an_objective(data: st.DataObject, batch: Batch, mode: str) -> None:
    """Alone, in parts, of log-probs that differ from the old ones; distances at which k3's value is not bounded."""
    shape, parts = batch.shape, data.draw(cuts(batch.shape.rows))
    change = data.draw(shape.on_grid(-16, 32, 16))
    ref = [[n - c for n, c in zip(*rows, strict=True)] for rows in zip(batch.new, change, strict=True)]

    def whole(new: Rows) -> float:
        tokens = [list(zip(*rows, strict=True)) for rows in zip(new, ref, batch.old, strict=True)]
        return AGGREGATES[mode]([[unbiased_k3(*token) for token in row] for row in tokens], shape.masks, shape.columns)

    columns = batch.columns | {"ref_log_probs": shape.hide(ref)}
    columns["advantages"] = torch.zeros_like(columns["advantages"])
    settings = objective_settings(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="unbiased_k3", loss_agg_mode=mode)
    loss = partial(policy_objective, settings=settings)
    check_in_parts(loss, columns, parts, shape, whole(batch.new), slopes(whole, batch.new), 10)


@given(data=st.data(), batch=batches(), loss_mode=st.sampled_from(["vanilla", "gspo", "cispo", "dro"]))
def test_off_policy_sequences_in_parts(data: st.DataObject, batch: Batch, loss_mode: str) -> None:
    """The loss is that of weights 0 on them, however the batch is cut; and so is the share that is reported."""
    shape, parts = batch.shape, data.draw(cuts(batch.shape.rows))
    rollout = data.draw(shape.on_grid(-48, -4, 16))
    rows = zip(rollout, batch.new, batch.advantages, shape.masks, strict=True)
    with decided():
        stay = [opsm_kept(*(masked(row, mask) for row in three), 0.3) for *three, mask in rows]
    kept = torch.tensor(shape.in_place(stay, 1.0))
    columns = batch.columns
    weighed = columns | {"rollout_is_weights": kept * columns.get("rollout_is_weights", torch.ones_like(kept))}
    expected, _ = policy_objective(weighed, objective_settings(loss_mode=loss_mode), **shape.counts)
    settings = objective_settings(loss_mode=loss_mode, off_policy_threshold=0.3)
    columns["rollout_log_probs"] = shape.hide(rollout)
    results = [policy_objective({n: v[part] for n, v in columns.items()}, settings, **shape.counts) for part in parts]
    assert_near(torch.stack([loss for loss, _ in results]).sum(), expected.item(), scale=10)
    tokens = [shape.mask[part].sum() for part in parts]
    gone = sum(m["actor/off_policy_masked_fraction"] * n for (_, m), n in zip(results, tokens, strict=True))
    assert_near(torch.as_tensor(gone), (1 - kept).sum())


@given(data=st.data(), shape=shapes())
def test_exact_kl(data: st.DataObject, shape: Shape) -> None:
    """One vocabulary a row."""
    p, q = data.draw(shape.on_grid(-32, 32, 8)), data.draw(shape.on_grid(-32, 32, 8))

    rows = list(zip(p, q, strict=True))
    logits = torch.tensor(p, requires_grad=True)
    found = kl_penalty("full", logits, torch.tensor(q))
    found.sum().backward()
    assert_near(found, [full(*row) for row in rows])
    assert logits.grad is not None
    assert_near(logits.grad, slopes(lambda moved: sum(map(full, moved, q)), p))


def objective(batch: Batch, ref: Rows, entropy: Rows, mode: str, kl: Estimator) -> tuple[float, float]:
    """DeepSeekMath (arXiv 2402.03300) with 1/2 of the KL, less 1/4 of the entropy: one aggregate for all three.

    Returns:
        (the objective, the sum of its token losses' sizes).
    """
    pairs = [list(zip(*rows, strict=True)) for rows in zip(batch.new, ref, strict=True)]
    divergence = [[kl(p, q) for p, q in row] for row in pairs]
    policy = [vanilla(row, objective_settings().options) for row in batch.trained(set())]
    full_masks = [[1.0] * len(row) for row in policy]
    terms = [(1.0, policy, full_masks), (0.5, divergence, batch.shape.masks), (-0.25, entropy, batch.shape.masks)]
    value = sum(weight * AGGREGATES[mode](rows, masks, batch.shape.columns) for weight, rows, masks in terms)
    return value, sum(abs(weight * loss) for weight, rows, _ in terms for row in rows for loss in row)


TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.5, "entropy_coeff": 0.25}
CORRECTIONS = [
    None,
    {"rollout_is": "token", "rollout_is_threshold": 2.0},
    {"rollout_is": "sequence", "rollout_is_threshold": 1.5, "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
    {"rollout_is": None, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.1},
]


def corrected(batch: Batch, options: dict | None) -> Batch:
    """With weights between the policy as it is and the old one, which sampled; 0 on rejected tokens."""
    if options is None:
        return batch
    masks = batch.shape.masks
    lambdas = [[n - o for n, o in zip(*rows, strict=True)] for rows in zip(batch.new, batch.old, strict=True)]
    rows = [masked(row, mask) for row, mask in zip(lambdas, masks, strict=True)]
    weights = [[1.0] * len(row) for row in rows]
    if options["rollout_is"]:
        weights = importance_weights(lambdas, masks, options["rollout_is"], None, options["rollout_is_threshold"])
    if "rollout_rs" in options:
        stay = [kept(row, options["rollout_rs"], None, options["rollout_rs_threshold"]) for row in rows]
        weights = [[w * s for w, s in zip(*pair, strict=True)] for pair in zip(weights, stay, strict=True)]
    return replace(batch, weights=batch.shape.in_place(weights, 1.0))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@given(data=st.data(), batch=batches(), name=st.sampled_from(["k1", "k2", "k3", "k3+"]))
@FEW
def test_the_objective_in_parts(
    data: st.DataObject, batch: Batch, mode: str, name: str, correction: dict | None
) -> None:
    """With the counts of the whole; weights of the moving policy carry no gradient."""
    shape, parts = batch.shape, data.draw(cuts(batch.shape.rows))
    ref, entropy = data.draw(shape.on_grid(-48, -4, 16)), data.draw(shape.on_grid(0, 16, 8))
    value, sloped = ESTIMATORS[name]

    with decided():
        weighed = corrected(batch, correction)
        expected, size = objective(weighed, ref, entropy, mode, value)
        gradient = slopes(
            lambda new: objective(replace(weighed, new=new), ref, entropy, mode, sloped)[0], batch.new, shape.masks
        )
    columns = batch.columns | {"ref_log_probs": shape.hide(ref), "entropy": shape.hide(entropy)}
    settings = objective_settings(**TERMS, loss_agg_mode=mode, kl_loss_type=name, correction=correction)
    check_in_parts(partial(policy_objective, settings=settings), columns, parts, shape, expected, gradient, size)


@pytest.mark.parametrize("case", cases("value_loss", ("clipped",)))
def test_the_formula_gives_verls_value_loss(case: dict) -> None:
    inputs, options = case["inputs"], case["config"]
    rows = zip(inputs["vpreds"], inputs["values"], inputs["returns"], strict=True)
    reach, masks = options["cliprange_value"], inputs["response_mask"]
    errors = [[value_error(*token, reach) for token in zip(*row, strict=True)] for row in rows]
    found = AGGREGATES[options["loss_agg_mode"]](errors, masks, len(masks[0]))
    assert_near(torch.tensor(case["outputs"]["loss"]), found)


@given(data=st.data(), shape=shapes(), mode=st.sampled_from(LOSS_AGG_MODES))
def test_value_loss(data: st.DataObject, shape: Shape, mode: str) -> None:
    now, before, target = (data.draw(shape.on_grid(-16, 16, 8)) for _ in range(3))

    def whole(moved: Rows) -> float:
        rows = zip(moved, before, target, strict=True)
        errors = [[value_error(*token, 0.3) for token in zip(*row, strict=True)] for row in rows]
        return AGGREGATES[mode](errors, shape.masks, shape.columns)

    with decided():
        expected, gradient = whole(now), slopes(whole, now)
    vpreds = shape.hide(now).requires_grad_()
    found, _ = compute_value_loss(
        vpreds=vpreds,
        values=shape.hide(before),
        returns=shape.hide(target),
        response_mask=shape.mask,
        cliprange_value=0.3,
        loss_agg_mode=mode,
    )
    found.backward()
    assert_near(found, expected)
    assert vpreds.grad is not None
    assert_near(vpreds.grad, gradient)
