"""The losses of supervised fine-tuning, of a reward model and of a critic, by numbers worked out on paper."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_dist.algorithms import compute_value_loss
from grpo_dist.algorithms.losses import label_loss, pair_loss, supervised_loss
from grpo_dist.errors import BatchError
from tests.golden import cases, tensors
from tests.messages import refuses

# Probabilities 1/2, 1/4 and 1/8 of trained tokens; what is not trained may be anything.
LOG_PROBS = torch.tensor([[-math.log(2), -math.log(4)], [-math.inf, -math.log(8)]])
MASK = torch.tensor([[1.0, 1.0], [0.0, 1.0]])


def test_supervised_by_hand() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    loss = supervised_loss(log_probs, MASK, global_tokens=3)
    assert loss.item() == pytest.approx(6 * math.log(2) / 3)
    loss.backward()
    assert log_probs.grad.flatten().tolist() == pytest.approx([-1 / 3, -1 / 3, 0.0, -1 / 3])


def test_pairs_by_hand() -> None:
    """Margins log 3, -log 3 and 0: probabilities 3/4, 1/4 and 1/2. The tie is not right. In two parts."""
    chosen = torch.tensor([1.0 + math.log(3), 2.0, 5.0], requires_grad=True)
    rejected = torch.tensor([1.0, 2.0 + math.log(3), 5.0], requires_grad=True)
    _, metrics = pair_loss(chosen, rejected, global_pairs=3)
    assert metrics["reward_model/accuracy"].item() == pytest.approx(1 / 3)
    assert metrics["reward_model/margin"].item() == pytest.approx(0.0, abs=1e-6)
    parts = [pair_loss(chosen[part], rejected[part], global_pairs=3)[0] for part in (slice(0, 1), slice(1, 3))]
    assert [part.item() for part in parts] == pytest.approx([math.log(4 / 3) / 3, math.log(8) / 3])
    sum(parts).backward()
    # the gradient of -log sigmoid(m) is sigmoid(m) - 1, here divided by three pairs
    assert chosen.grad.tolist() == pytest.approx([-1 / 12, -3 / 12, -2 / 12])
    assert rejected.grad.tolist() == pytest.approx([1 / 12, 3 / 12, 2 / 12])
    # -log sigmoid(-1000) = 1000, where the sigmoid itself is 0 in float32.
    chosen = torch.tensor([-1000.0, 1000.0], requires_grad=True)
    loss, _ = pair_loss(chosen, torch.zeros(2), global_pairs=1)
    loss.backward()
    assert loss.item() == 1000.0
    assert chosen.grad.tolist() == [-1.0, 0.0]


def test_labels_by_hand() -> None:
    """Probabilities 3/4 and 1/2 of a 1, and 1/4 of a 0, of which one was said. A value of 0 says 0."""
    values = torch.tensor([[math.log(3), 9.0, 0.0], [-math.log(3), math.inf, -9.0]], requires_grad=True)
    labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, math.nan, 1.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    loss, metrics = label_loss(values, labels, mask, global_labels=4)
    assert loss.item() == pytest.approx((2 * math.log(4 / 3) + math.log(2)) / 4)
    assert metrics["reward_model/accuracy"].item() == pytest.approx(2 / 3)
    loss.backward()
    # sigmoid(r) - y, divided by four labels; what is off the mask has no say, be it infinite
    assert values.grad.flatten().tolist() == pytest.approx([-1 / 16, 0.0, -1 / 8, 1 / 16, 0.0, 0.0])


def test_nothing_to_train_is_a_loss_of_zero_with_a_gradient() -> None:
    values, zeros = torch.ones(1, 1, requires_grad=True), torch.zeros(1, 1)
    losses = [
        (supervised_loss(values, zeros, global_tokens=torch.tensor(0.0)), {}),
        pair_loss(values[0, :0], values[0, :0], global_pairs=0),
        label_loss(values, zeros, zeros, global_labels=0),
        value_loss(values, zeros, zeros, zeros),
    ]
    for loss, metrics in losses:
        values.grad = None
        loss.backward()
        assert (loss.item(), values.grad.tolist()) == (0.0, [[0.0]])
        assert not any(value.item() for value in metrics.values())


# --- a critic's --------------------------------------------------------------------------------------------------
def value_loss(vpreds: Tensor, values: Tensor, returns: Tensor, mask: Tensor, **options: Any) -> tuple[Tensor, dict]:
    columns = {"vpreds": vpreds, "values": values, "returns": returns, "response_mask": mask}
    return compute_value_loss(**columns, **{"cliprange_value": 0.5} | options)


@pytest.mark.parametrize("case", cases("value_loss", ("clipped", "counted")))
def test_equals_verl_under_every_aggregation(case: dict) -> None:
    """With counts of these rows, one of which is masked whole, and with those of a larger mini-batch."""
    inputs, expected = tensors(case["inputs"]), case["outputs"]
    inputs["vpreds"].requires_grad_()
    loss, metrics = compute_value_loss(**inputs, **case["config"])
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    if "grad" in expected:
        torch.testing.assert_close(inputs["vpreds"].grad, torch.tensor(expected["grad"]), rtol=1e-5, atol=1e-6)
    told = {"vf_loss": "loss", "vf_clipfrac": "clipfrac", "vpred_mean": "mean"}
    told = {f"critic/{name}": expected[what] for name, what in told.items() if what in expected}
    assert {name: metrics[name].item() for name in told} == pytest.approx(told)
    assert not any(value.requires_grad for value in metrics.values())


def test_values_by_hand() -> None:
    """Value 1, was 0, may move by 1/2, return 0 and 3: errors max(1, 1/4) and max(4, 6.25); the infinite one is off."""
    vpreds = torch.tensor([[1.0, 1.0, math.inf]], requires_grad=True)
    mask, returns = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[0.0, 3.0, 0.0]])
    loss, metrics = value_loss(vpreds, torch.zeros(1, 3), returns, mask)
    loss.backward()
    assert loss.item() == pytest.approx((1 + 6.25) / 4)
    assert metrics["critic/vpred_mean"].item() == 1
    assert vpreds.grad.tolist() == [[0.5, 0.0, 0.0]]  # the clipped one does not move


def test_shapes_that_differ_are_named() -> None:
    zeros = torch.zeros(1, 2)
    with refuses(BatchError, "(2, 2)", "(1, 2)"):
        supervised_loss(LOG_PROBS, MASK[:1], global_tokens=3)
    with refuses(BatchError, "chosen (2,)", "rejected (1,)"):
        pair_loss(torch.zeros(2), torch.zeros(1), global_pairs=2)
    with refuses(BatchError, "labels (1, 2)", "values (1, 1)"):
        label_loss(torch.zeros(1, 1), zeros, torch.zeros(1, 1), global_labels=1)
    with refuses(BatchError, "returns (1, 1)", "vpreds (1, 2)"):
        value_loss(zeros, zeros, zeros[:, :1], zeros)
