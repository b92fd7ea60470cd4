import math

import pytest
import torch

from grpo_dist.algorithms import compute_value_loss
from grpo_dist.errors import BatchError
from tests.golden import cases, tensors
from tests.messages import refuses


@pytest.mark.parametrize("case", cases("value_loss", ("clipped",)))
def test_equals_verl(case: dict) -> None:
    loss, metrics = compute_value_loss(**tensors(case["inputs"]), **case["config"])
    torch.testing.assert_close(loss, torch.tensor(case["outputs"]["loss"]), rtol=1e-5, atol=1e-6)
    assert metrics["critic/vf_clipfrac"].item() == pytest.approx(case["outputs"]["clipfrac"])


def test_by_hand() -> None:
    """Value 1, was 0, may move by 1/2, return 0 and 3: errors max(1, 1/4) and max(4, 6.25); half their mean."""
    arguments = {"values": torch.zeros(1, 2), "response_mask": torch.ones(1, 2), "cliprange_value": 0.5}
    vpreds = torch.ones(1, 2, requires_grad=True)
    loss, metrics = compute_value_loss(vpreds=vpreds, returns=torch.tensor([[0.0, 3.0]]), **arguments)
    assert loss.item() == pytest.approx((1 + 6.25) / 4)
    assert metrics["critic/vf_clipfrac"].item() == 0.5
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


def test_mistakes_are_named() -> None:
    ones = torch.ones(1, 2)
    with refuses(BatchError, "returns (1, 1)", "vpreds (1, 2)"):
        compute_value_loss(vpreds=ones, values=ones, returns=ones[:, :1], response_mask=ones, cliprange_value=1)
