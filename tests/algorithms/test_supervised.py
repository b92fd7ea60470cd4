"""The loss of supervised fine-tuning, by numbers worked out on paper."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_dist.algorithms.supervised import supervised_loss
from grpo_dist.errors import BatchError
from tests.messages import refuses

# Probabilities 1/2, 1/4 and 1/8 of trained tokens; what is not trained may be anything.
LOG_PROBS = torch.tensor([[-math.log(2), -math.log(4)], [-math.inf, -math.log(8)]])
MASK = torch.tensor([[1.0, 1.0], [0.0, 1.0]])


def test_by_hand() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    loss = supervised_loss(log_probs, MASK, global_tokens=3)
    assert loss.item() == pytest.approx(6 * math.log(2) / 3)
    loss.backward()
    assert log_probs.grad.tolist() == [pytest.approx([-1 / 3, -1 / 3]), pytest.approx([0.0, -1 / 3])]


def test_every_token_weighs_the_same_whatever_the_length_of_its_row() -> None:
    """A mean of the rows' means would be (1.5 + 3) / 2 log 2 instead of 6 / 3 log 2."""
    rows = [supervised_loss(LOG_PROBS[i : i + 1], MASK[i : i + 1], global_tokens=3).item() for i in range(2)]
    assert rows == pytest.approx([math.log(2), math.log(2)])


def test_nothing_to_train_is_a_loss_of_zero_with_a_gradient() -> None:
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    loss = supervised_loss(log_probs, torch.zeros(1, 1), global_tokens=torch.tensor(0.0))
    loss.backward()
    assert (loss.item(), log_probs.grad.tolist()) == (0.0, [[0.0]])


def test_columns_of_other_shapes_are_refused() -> None:
    with refuses(BatchError, "(2, 2)", "(1, 2)"):
        supervised_loss(LOG_PROBS, MASK[:1], global_tokens=3)
