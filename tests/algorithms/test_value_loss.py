import math

import pytest
import torch

from grpo_dist.algorithms import compute_value_loss
from grpo_dist.errors import BatchError
from grpo_dist.plugins.names import LOSS_AGG_MODES
from tests.golden import cases, tensors
from tests.messages import refuses


@pytest.mark.parametrize("case", cases("value_loss", ("clipped",)))
def test_equals_verl(case: dict) -> None:
    loss, metrics = compute_value_loss(**tensors(case["inputs"]), **case["config"])
    torch.testing.assert_close(loss, torch.tensor(case["outputs"]["loss"]), rtol=1e-5, atol=1e-6)
    assert metrics["critic/vf_clipfrac"].item() == pytest.approx(case["outputs"]["clipfrac"])


@pytest.mark.parametrize("case", cases("value_loss", ("counted",)))
def test_equals_verl_under_every_aggregation(case: dict) -> None:
    """With counts of these rows, one of which is masked whole, and with those of a larger mini-batch."""
    inputs, expected = tensors(case["inputs"]), case["outputs"]
    inputs["vpreds"].requires_grad_()
    loss, metrics = compute_value_loss(**inputs, **case["config"])
    loss.backward()
    torch.testing.assert_close(inputs["vpreds"].grad, torch.tensor(expected["grad"]), rtol=1e-5, atol=1e-6)
    told = {"vf_loss": expected["loss"], "vf_clipfrac": expected["clipfrac"], "vpred_mean": expected["mean"]}
    assert {name: metrics[f"critic/{name}"].item() for name in told} == pytest.approx(told)
    assert not any(value.requires_grad for value in metrics.values())


def test_by_hand() -> None:
    """Value 1, was 0, may move by 1/2, return 0 and 3: errors max(1, 1/4) and max(4, 6.25); half their mean."""
    arguments = {"values": torch.zeros(1, 2), "response_mask": torch.ones(1, 2), "cliprange_value": 0.5}
    vpreds = torch.ones(1, 2, requires_grad=True)
    loss, metrics = compute_value_loss(vpreds=vpreds, returns=torch.tensor([[0.0, 3.0]]), **arguments)
    assert loss.item() == pytest.approx((1 + 6.25) / 4)
    assert metrics["critic/vf_clipfrac"].item() == 0.5
    assert metrics["critic/vf_loss"].item() == loss.item()
    assert metrics["critic/vpred_mean"].item() == 1
    loss.backward()
    assert vpreds.grad.tolist() == [[0.5, 0.0]]  # the clipped one does not move


def test_what_is_off_the_mask_has_no_say() -> None:
    """In the gradient neither: that of an infinite error is nan, and 0 * nan is nan."""
    vpreds = torch.tensor([[1.0, math.inf]], requires_grad=True)
    mask, zeros = torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2)
    loss, _ = compute_value_loss(vpreds=vpreds, values=zeros, returns=zeros, response_mask=mask, cliprange_value=2.0)
    loss.backward()
    assert loss.item() == 0.5
    assert vpreds.grad.tolist() == [[1.0, 0.0]]


def test_parts_add_up_to_the_whole_however_they_are_cut() -> None:
    """Counts are the mini-batch's; a part of which nothing trains adds 0 and has no gradient."""
    generator = torch.Generator().manual_seed(0)
    vpreds, values, returns = torch.randn(3, 4, 5, generator=generator)
    mask = torch.tensor([[1.0, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 0, 0]])
    columns = {"values": values, "returns": returns, "response_mask": mask}
    counts = {"global_tokens": 8.0, "global_sequences": 3.0, "loss_scale_factor": 5.0}
    for mode in LOSS_AGG_MODES:
        options = {"cliprange_value": 0.3, "loss_agg_mode": mode}
        whole, _ = compute_value_loss(vpreds=vpreds, **columns, **options, loss_scale_factor=5.0)
        assert whole > 0
        for rows in ([[0], [1], [2], [3]], [[3, 1], [2, 0]]):
            cut = [{name: column[part] for name, column in columns.items()} for part in rows]
            parts = [
                compute_value_loss(vpreds=vpreds[part], **of_part, **options, **counts)[0]
                for part, of_part in zip(rows, cut, strict=True)
            ]
            assert sum(part.item() for part in parts) == pytest.approx(whole.item()), mode
    masked = vpreds[[2]].clone().requires_grad_()
    of_row = {name: column[[2]] for name, column in columns.items()}
    loss, metrics = compute_value_loss(vpreds=masked, **of_row, **options)
    loss.backward()
    assert loss.item() == 0
    assert not masked.grad.any()
    assert {value.item() for value in metrics.values()} == {0}


def test_mistakes_are_named() -> None:
    ones = torch.ones(1, 2)
    with refuses(BatchError, "returns (1, 1)", "vpreds (1, 2)"):
        compute_value_loss(vpreds=ones, values=ones, returns=ones[:, :1], response_mask=ones, cliprange_value=1)
