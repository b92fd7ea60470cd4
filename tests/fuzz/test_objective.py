"""KL estimators, policy losses, the objective of all terms and the value loss against the papers, in parts too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_dist.algorithms import agg_loss, compute_policy_loss, compute_value_loss, kl_penalty, policy_objective
from grpo_dist.algorithms.aggregate import LOSS_AGG_MODES
from grpo_dist.algorithms.kl import KL
from grpo_dist.algorithms.policy_loss import POLICY_LOSS, token_selection
from grpo_dist.plugins.names import TOKEN_SELECTING_LOSSES
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
from tests.fuzz.papers import Rows
from tests.fuzz.papers.aggregates import AGGREGATES
from tests.fuzz.papers.kl import ESTIMATORS, PLAIN, Estimator, full, unbiased_k3
from tests.fuzz.papers.policy_losses import LOSSES, Loss, Row, between, covariances, highest, share, vanilla
from tests.fuzz.papers.value_loss import value_error
from tests.golden import cases, tensors
from tests.worker_settings import objective_settings


def test_every_kl_estimator_has_a_formula() -> None:
    assert {name for name in ESTIMATORS if not name.endswith("+")} == set(KL.names()) - {"full", "unbiased_k3"}


@pytest.mark.parametrize("case", cases("kl", (*PLAIN, "k1+", "k3+")))
def test_formulas_and_package_give_verls_kl(case: dict) -> None:
    (value, sloped), inputs = ESTIMATORS[case["name"]], case["inputs"]
    rows = list(zip(inputs["log_prob"], inputs["ref_log_prob"], strict=True))
    verls, log_probs = torch.tensor(case["outputs"]["kl"]), torch.tensor(inputs["log_prob"], requires_grad=True)
    kl = kl_penalty(case["name"], log_probs, torch.tensor(inputs["ref_log_prob"]))
    torch.testing.assert_close(kl.detach(), verls, rtol=1e-5, atol=1e-6)
    assert_near(verls, [[value(p, q) for p, q in zip(*row, strict=True)] for row in rows])
    if "grad" in case["outputs"]:
        gradient = torch.tensor(case["outputs"]["grad"])
        kl.sum().backward()
        torch.testing.assert_close(log_probs.grad, gradient, rtol=1e-5, atol=1e-6)
        slope = [[derivative(lambda p, q=q: sloped(p, q), p) for p, q in zip(*row, strict=True)] for row in rows]
        assert_near(gradient, slope)


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


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(data=st.data(), batch=batches(), name=st.sampled_from(["k1", "k2", "k3", "k3+"]))
def test_the_objective_in_parts(data: st.DataObject, batch: Batch, mode: str, name: str) -> None:
    """With the counts of the whole."""
    shape, parts = batch.shape, data.draw(cuts(batch.shape.rows))
    ref, entropy = data.draw(shape.on_grid(-48, -4, 16)), data.draw(shape.on_grid(0, 16, 8))
    value, sloped = ESTIMATORS[name]

    def whole(new: Rows) -> float:
        return objective(replace(batch, new=new), ref, entropy, mode, sloped)[0]

    with decided():
        expected, size = objective(batch, ref, entropy, mode, value)
        gradient = slopes(whole, batch.new, shape.masks)
    columns = batch.columns | {"ref_log_probs": shape.hide(ref), "entropy": shape.hide(entropy)}
    terms = {"use_kl_loss": True, "kl_loss_coef": 0.5, "entropy_coeff": 0.25, "kl_loss_type": name}
    loss = partial(policy_objective, settings=objective_settings(**terms, loss_agg_mode=mode))
    check_in_parts(loss, columns, parts, shape, expected, gradient, size)


@pytest.mark.parametrize("case", cases("value_loss", ("clipped",)))
def test_formula_and_package_give_verls_value_loss(case: dict) -> None:
    inputs, options = case["inputs"], case["config"]
    rows = zip(inputs["vpreds"], inputs["values"], inputs["returns"], strict=True)
    errors = [[value_error(*token, options["cliprange_value"]) for token in zip(*row, strict=True)] for row in rows]
    found = AGGREGATES[options["loss_agg_mode"]](errors, inputs["response_mask"], len(inputs["vpreds"][0]))
    verls = torch.tensor(case["outputs"]["loss"])
    assert_near(verls, found)
    loss, metrics = compute_value_loss(**tensors(inputs), **options)
    torch.testing.assert_close(loss, verls, rtol=1e-5, atol=1e-6)
    assert metrics["critic/vf_clipfrac"].item() == pytest.approx(case["outputs"]["clipfrac"])


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


# --- policy losses ---------------------------------------------------------------------------------------------------
# clip_cov picks at random: verl's has no reproducible case. It has no topr and no vespo.
IN_GOLDEN = sorted(set(LOSSES) - {"clip_cov", "topr", "vespo"})
OPTIONS = st.fixed_dictionaries({
    "clip_ratio": st.sampled_from([0.15, 0.2]), "clip_ratio_low": st.sampled_from([None, 0.1, 0.25]),
    "clip_ratio_high": st.sampled_from([None, 0.28, 0.5]), "clip_ratio_c": st.sampled_from([1.5, 3.0]),
    "tau_pos": st.sampled_from([0.5, 1.0]), "tau_neg": st.sampled_from([1.05, 2.0]),
    "dro_beta": st.sampled_from([0.1, 1.0]), "ppo_kl_coef": st.sampled_from([0.1, 1.0]),
    "vespo_k_pos": st.sampled_from([1.0, 2.0]), "vespo_lambda_pos": st.sampled_from([1.0, 3.0]),
    "vespo_k_neg": st.sampled_from([1.0, 3.0]), "vespo_lambda_neg": st.sampled_from([0.5, 2.0]),
})  # fmt: skip


def total(loss: Loss, rows: list[Row], options: dict[str, Any], mode: str, scale: float) -> tuple[float, float]:
    """(aggregated loss, the same of the sizes of the token losses)."""
    losses = [loss(row, options) for row in rows]
    masks = [[1.0] * len(row) for row in losses]
    sizes = [[abs(value) for value in row] for row in losses]
    return AGGREGATES[mode](losses, masks, scale), AGGREGATES[mode](sizes, masks, scale)


def row_slopes(loss: Loss, rows: list[Row], options: dict[str, Any], mode: str, scale: float) -> Rows:
    """The aggregated loss differentiated by each trained token's log-prob."""
    losses = [loss(row, options) for row in rows]
    masks = [[1.0] * len(row) for row in losses]

    def moved(i: int, t: int, value: float) -> float:
        new = [*rows[i].new[:t], value, *rows[i].new[t + 1 :]]
        row = loss(replace(rows[i], new=new), options)
        return AGGREGATES[mode]([*losses[:i], row, *losses[i + 1 :]], masks, scale)

    return [
        [derivative(lambda x, i=i, t=t: moved(i, t, x), value) for t, value in enumerate(row.new)]
        for i, row in enumerate(rows)
    ]


def test_every_loss_and_aggregation_has_a_formula() -> None:
    assert set(LOSSES) == set(POLICY_LOSS.names())
    assert set(AGGREGATES) == set(LOSS_AGG_MODES)


@pytest.mark.parametrize("case", cases("agg", tuple(set(LOSS_AGG_MODES) - {"prompt-mean"})))
def test_aggregations_of_formulas_and_package_are_verls(case: dict) -> None:
    losses, masks = case["inputs"]["loss_mat"], case["inputs"]["loss_mask"]
    scale, name, verls = case["config"]["loss_scale_factor"], case["name"], torch.tensor(case["outputs"]["loss"])
    assert_near(verls, AGGREGATES[name](losses, masks, scale or len(masks[0])))
    found = agg_loss(torch.tensor(losses), torch.tensor(masks), loss_agg_mode=name, loss_scale_factor=scale)
    torch.testing.assert_close(found, verls, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", cases("policy_loss", tuple(IN_GOLDEN)))
def test_losses_and_gradients_of_formulas_and_package_are_verls(case: dict) -> None:
    """And the package's metrics. geo_mean: verl takes the mean over sequences, whatever `loss_agg_mode` says."""
    inputs, name = case["inputs"], case["name"]
    mode = "seq-mean-token-mean" if name == "geo_mean" else case["config"]["loss_agg_mode"]
    options, mask = case["config"] | {"loss_mode": name, "loss_agg_mode": mode}, inputs["response_mask"]
    shape = Shape(len(mask), len(mask[0]), mask)
    columns = [inputs[column] for column in ("log_prob", "old_log_prob", "advantages")]
    batch, selected = Batch(shape, *columns, inputs.get("rollout_is_weights")), set()
    if name == "kl_cov":
        selected = highest(covariances(batch.new, batch.advantages, mask), options["kl_cov_ratio"])
    rows, verls = batch.trained(selected), {key: torch.tensor(case["outputs"][key]) for key in ("loss", "grad")}
    value, size = total(LOSSES[name], rows, options, mode, shape.columns)
    assert_near(verls["loss"], value, scale=size)
    assert_near(verls["grad"], shape.in_place(row_slopes(LOSSES[name], rows, options, mode, shape.columns)), scale=size)

    given = {column: torch.tensor(values) for column, values in inputs.items()}
    log_probs = given["log_prob"].requires_grad_()
    given |= {"log_probs": log_probs, "old_log_probs": given["old_log_prob"]}
    loss, metrics = compute_policy_loss(given, objective_settings(**options))
    loss.backward()
    torch.testing.assert_close(loss.detach(), verls["loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(log_probs.grad, verls["grad"], rtol=1e-5, atol=1e-6)
    ours_alone = {"gpg": {"actor/ppo_kl"}}.get(name, {"actor/selected"})  # verl's gpg reports nothing
    found = {key: float(values) for key, values in metrics.items() if key not in ours_alone}
    assert found == pytest.approx(case["outputs"]["metrics"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", LOSSES)
@given(data=st.data(), batch=batches(), options=OPTIONS, factor=st.sampled_from([None, 7.0]))
@FEW
def test_policy_losses(
    name: str, data: st.DataObject, batch: Batch, options: dict[str, Any], mode: str, factor: float | None
) -> None:
    """Value and gradient, in parts with the counts of the whole."""
    shape, parts = batch.shape, data.draw(cuts(batch.shape.rows))
    picked = data.draw(shape.on_grid(0, 1, 1)) if name in TOKEN_SELECTING_LOSSES else None
    selected = {(i, t) for i, row in enumerate(picked or []) for t, value in enumerate(row) if value}
    rows, scale = batch.trained(selected), factor or shape.columns
    with decided():
        expected, size = total(LOSSES[name], rows, options, mode, scale)
        gradients = row_slopes(LOSSES[name], rows, options, mode, scale)
    settings = objective_settings(loss_mode=name, loss_agg_mode=mode, loss_scale_factor=factor, **options)
    columns = batch.columns | ({} if picked is None else {"selected_tokens": torch.tensor(picked)})
    loss = partial(compute_policy_loss, settings=settings)
    check_in_parts(loss, columns, parts, shape, expected, shape.in_place(gradients), size)


@given(batch=batches(), ratio=st.sampled_from([1e-4, 0.2, 0.5, 1.0]))
def test_kl_cov_selects_the_highest_covariances(batch: Batch, ratio: float) -> None:
    """An empty batch selects nothing, else at least one token."""
    shape = batch.shape
    with decided():
        expected = highest(covariances(batch.new, batch.advantages, shape.masks), ratio)
    assert selection("kl_cov", batch, {"kl_cov_ratio": ratio}) == expected


@given(batch=batches(), ratio=st.sampled_from([1e-4, 0.2, 0.5, 1.0]), bounds=st.sampled_from([(0.3, 5.0), (-1.0, 0.5)]))
def test_clip_cov_selects_among_tokens_between_bounds(batch: Batch, ratio: float, bounds: tuple[float, float]) -> None:
    shape = batch.shape
    with decided():
        candidates = between(covariances(batch.new, batch.advantages, shape.masks), *bounds)
    options = {"clip_cov_ratio": ratio, "clip_cov_lb": bounds[0], "clip_cov_ub": bounds[1]}
    found = selection("clip_cov", batch, options)
    assert found <= candidates
    assert len(found) == min(len(candidates), share(shape.counts["global_tokens"], ratio))


def selection(name: str, batch: Batch, options: dict[str, Any]) -> set[tuple[int, int]]:
    shape = batch.shape
    found = token_selection(
        name,
        log_probs=shape.hide(batch.new),
        advantages=shape.hide(batch.advantages),
        response_mask=shape.mask,
        config=objective_settings(**options).options,
    )
    assert found is not None
    return {(int(i), int(t)) for i, t in found.nonzero()}
