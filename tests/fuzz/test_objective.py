"""KL estimators, the objective of all three terms and the value loss against the papers' formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_dist.algorithms import compute_value_loss, kl_penalty, policy_objective
from grpo_dist.algorithms.aggregate import LOSS_AGG_MODES
from grpo_dist.algorithms.kl import KL
from tests.fuzz.batches import EXAMPLES, FEW, Batch, Shape, assert_near, batches, cuts, decided, derivative, shapes
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
@EXAMPLES
def test_kl_estimators(name: str, data: st.DataObject, shape: Shape) -> None:
    """Distances up to 25: k3's value is bounded from e^2.5 on."""
    value, sloped = ESTIMATORS[name]
    p, q = data.draw(shape.on_grid(-48, -1, 16)), data.draw(shape.on_grid(-400, -1, 16) | shape.on_grid(-48, -1, 16))
    pairs = [list(zip(*rows, strict=True)) for rows in zip(p, q, strict=True)]
    with decided():
        expected = [[value(*pair) for pair in row] for row in pairs]
        slopes = [[derivative(lambda x, b=b: sloped(x, b), a) for a, b in row] for row in pairs]
    log_probs = torch.tensor(p, requires_grad=True)
    found = kl_penalty(name, log_probs, torch.tensor(q))
    found.sum().backward()
    assert_near(found, expected)
    assert log_probs.grad is not None
    assert_near(log_probs.grad, slopes)


@given(data=st.data(), batch=batches(), mode=st.sampled_from(LOSS_AGG_MODES))
@EXAMPLES
def test_the_unbiased_kl_of_an_objective(data: st.DataObject, batch: Batch, mode: str) -> None:
    """Alone, in parts, of log-probs that differ from the old ones; distances at which k3's value is not bounded."""
    shape, parts = batch.shape, data.draw(cuts(batch.shape.rows))
    change = data.draw(shape.on_grid(-16, 32, 16))
    ref = [[n - c for n, c in zip(*rows, strict=True)] for rows in zip(batch.new, change, strict=True)]

    def whole(i: int, t: int, x: float) -> float:
        new = [[x if (i, t) == (j, u) else v for u, v in enumerate(row)] for j, row in enumerate(batch.new)]
        rows = [
            [unbiased_k3(*token) for token in zip(*row, strict=True)] for row in zip(new, ref, batch.old, strict=True)
        ]
        return AGGREGATES[mode](rows, shape.masks, shape.columns)

    expected = whole(0, 0, batch.new[0][0])
    slopes = [
        [derivative(lambda x, i=i, t=t: whole(i, t, x), batch.new[i][t]) for t in range(shape.columns)]
        for i in range(shape.rows)
    ]
    log_probs = shape.hide(batch.new).requires_grad_()
    columns = batch.columns(log_probs) | {"ref_log_probs": shape.hide(ref)}
    columns["advantages"] = torch.zeros_like(columns["advantages"])
    settings = objective_settings(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="unbiased_k3", loss_agg_mode=mode)
    found = torch.zeros(())
    for part in parts:
        cut = {name: values[part] for name, values in columns.items()}
        counts = {"global_tokens": shape.tokens, "global_sequences": shape.sequences}
        found = found + policy_objective(cut, settings, **counts)[0]
    found.backward()
    assert_near(found, expected, scale=10)
    assert log_probs.grad is not None
    assert_near(log_probs.grad, slopes, scale=10)


@given(data=st.data(), batch=batches(), loss_mode=st.sampled_from(["vanilla", "gspo", "cispo", "dro"]))
@EXAMPLES
def test_off_policy_sequences_in_parts(data: st.DataObject, batch: Batch, loss_mode: str) -> None:
    """The loss is that of weights 0 on them, however the batch is cut; and so is the share that is reported."""
    shape, parts = batch.shape, data.draw(cuts(batch.shape.rows))
    rollout = data.draw(shape.on_grid(-48, -4, 16))
    rows = zip(rollout, batch.new, batch.advantages, shape.masks, strict=True)
    with decided():
        stay = [opsm_kept(*(masked(row, mask) for row in three), 0.3) for *three, mask in rows]
    numbers = iter(number for row in stay for number in row)
    kept = torch.tensor([[float(next(numbers)) if m else 1.0 for m in mask] for mask in shape.masks])
    columns = batch.columns(shape.hide(batch.new))
    weighed = columns | {"rollout_is_weights": kept * columns.get("rollout_is_weights", torch.ones_like(kept))}
    counts = {"global_tokens": shape.tokens, "global_sequences": shape.sequences}
    expected, _ = policy_objective(weighed, objective_settings(loss_mode=loss_mode), **counts)
    settings = objective_settings(loss_mode=loss_mode, off_policy_threshold=0.3)
    columns["rollout_log_probs"] = shape.hide(rollout)
    results = [policy_objective({n: v[part] for n, v in columns.items()}, settings, **counts) for part in parts]
    assert_near(torch.stack([loss for loss, _ in results]).sum(), expected.item(), scale=10)
    tokens = [shape.mask[part].sum() for part in parts]
    gone = sum(m["actor/off_policy_masked_fraction"] * n for (_, m), n in zip(results, tokens, strict=True))
    assert_near(torch.as_tensor(gone), (1 - kept).sum())


@given(data=st.data(), shape=shapes())
@EXAMPLES
def test_exact_kl(data: st.DataObject, shape: Shape) -> None:
    """One vocabulary a row."""
    p, q = data.draw(shape.on_grid(-32, 32, 8)), data.draw(shape.on_grid(-32, 32, 8))

    def slope(row: list[float], ref: list[float], t: int) -> float:
        return derivative(lambda x: full([*row[:t], x, *row[t + 1 :]], ref), row[t])

    rows = list(zip(p, q, strict=True))
    logits = torch.tensor(p, requires_grad=True)
    found = kl_penalty("full", logits, torch.tensor(q))
    found.sum().backward()
    assert_near(found, [full(*row) for row in rows])
    assert logits.grad is not None
    assert_near(logits.grad, [[slope(*row, t) for t in range(shape.columns)] for row in rows])


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
    numbers = iter(weight for row in weights for weight in row)
    return replace(batch, weights=[[next(numbers) if m else 1.0 for m in mask] for mask in masks])


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

    def moved(weighed: Batch, i: int, t: int) -> float:
        def at(x: float) -> float:
            new = [[x if (i, t) == (j, u) else v for u, v in enumerate(row)] for j, row in enumerate(batch.new)]
            return objective(replace(weighed, new=new), ref, entropy, mode, sloped)[0]

        return derivative(at, batch.new[i][t])

    with decided():
        weighed = corrected(batch, correction)
        expected, size = objective(weighed, ref, entropy, mode, value)
        slopes = [[moved(weighed, i, t) if m else 0.0 for t, m in enumerate(row)] for i, row in enumerate(shape.masks)]
    log_probs = shape.hide(batch.new).requires_grad_()
    found = torch.zeros(())
    for part in parts:
        columns = batch.columns(log_probs) | {"ref_log_probs": shape.hide(ref), "entropy": shape.hide(entropy)}
        loss, _ = policy_objective(
            {column: values[part] for column, values in columns.items()},
            objective_settings(
                **(TERMS | {"loss_agg_mode": mode, "kl_loss_type": name, "correction": correction}),
            ),
            global_tokens=shape.tokens,
            global_sequences=shape.sequences,
        )
        found = found + loss
    found.backward()
    assert_near(found, expected, scale=size)
    assert log_probs.grad is not None
    assert_near(log_probs.grad, slopes, scale=size)


@pytest.mark.parametrize("case", cases("value_loss", ("clipped",)))
def test_the_formula_gives_verls_value_loss(case: dict) -> None:
    inputs, options = case["inputs"], case["config"]
    rows = zip(inputs["vpreds"], inputs["values"], inputs["returns"], strict=True)
    reach, masks = options["cliprange_value"], inputs["response_mask"]
    errors = [[value_error(*token, reach) for token in zip(*row, strict=True)] for row in rows]
    found = AGGREGATES[options["loss_agg_mode"]](errors, masks, len(masks[0]))
    assert_near(torch.tensor(case["outputs"]["loss"]), found)


@given(data=st.data(), shape=shapes(), mode=st.sampled_from(LOSS_AGG_MODES))
@EXAMPLES
def test_value_loss(data: st.DataObject, shape: Shape, mode: str) -> None:
    now, before, target = (data.draw(shape.on_grid(-16, 16, 8)) for _ in range(3))

    def whole(i: int, t: int, x: float) -> float:
        moved = [[x if (i, t) == (j, u) else v for u, v in enumerate(row)] for j, row in enumerate(now)]
        rows = zip(moved, before, target, strict=True)
        errors = [[value_error(*token, 0.3) for token in zip(*row, strict=True)] for row in rows]
        return AGGREGATES[mode](errors, shape.masks, shape.columns)

    def slope(i: int, t: int) -> float:
        return derivative(lambda x: whole(i, t, x), now[i][t])

    with decided():
        expected = whole(0, 0, now[0][0])
        slopes = [[slope(i, t) for t in range(shape.columns)] for i in range(shape.rows)]
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
    assert_near(vpreds.grad, slopes)
