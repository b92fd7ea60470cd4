"""The loss of supervised fine-tuning, by numbers worked out on paper.

The losses of a reward model, by numbers worked out on paper.
"""

from __future__ import annotations

import math

import pytest
import torch

from grpo_dist.algorithms.losses import label_loss, pair_loss, supervised_loss
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


def test_pairs_by_hand() -> None:
    """Margins log 3, -log 3 and 0: probabilities 3/4, 1/4 and 1/2. The tie is not right."""
    chosen = torch.tensor([1.0 + math.log(3), 2.0, 5.0], requires_grad=True)
    rejected = torch.tensor([1.0, 2.0 + math.log(3), 5.0], requires_grad=True)
    loss, metrics = pair_loss(chosen, rejected, global_pairs=3)
    assert loss.item() == pytest.approx((math.log(4 / 3) + math.log(4) + math.log(2)) / 3)
    assert metrics["reward_model/accuracy"].item() == pytest.approx(1 / 3)
    assert metrics["reward_model/margin"].item() == pytest.approx(0.0, abs=1e-6)
    loss.backward()
    # the gradient of -log sigmoid(m) is sigmoid(m) - 1, here divided by three pairs
    assert chosen.grad.tolist() == pytest.approx([-1 / 12, -3 / 12, -2 / 12])
    assert rejected.grad.tolist() == pytest.approx([1 / 12, 3 / 12, 2 / 12])


def test_parts_of_a_mini_batch_add_up() -> None:
    chosen, rejected = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.0, 1.0, -3.0])
    whole, _ = pair_loss(chosen, rejected, global_pairs=3)
    parts = [pair_loss(chosen[part], rejected[part], global_pairs=3)[0] for part in (slice(0, 1), slice(1, 3))]
    assert sum(parts).item() == pytest.approx(whole.item())


def test_margins_far_out_stay_finite() -> None:
    """-log sigmoid(-1000) = 1000, where the sigmoid itself is 0 in float32."""
    chosen = torch.tensor([-1000.0, 1000.0], requires_grad=True)
    loss, _ = pair_loss(chosen, torch.zeros(2), global_pairs=1)
    loss.backward()
    assert loss.item() == 1000.0
    assert chosen.grad.tolist() == [-1.0, 0.0]


def test_no_pairs_are_a_loss_of_zero_with_a_gradient() -> None:
    scores = torch.ones(1, requires_grad=True)
    loss, metrics = pair_loss(scores[:0], scores[:0], global_pairs=0)
    loss.backward()
    assert (loss.item(), scores.grad.tolist()) == (0.0, [0.0])
    assert [value.item() for value in metrics.values()] == [0.0, 0.0]


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


def test_no_labels_are_a_loss_of_zero() -> None:
    loss, metrics = label_loss(torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, 1), global_labels=0)
    assert (loss.item(), metrics["reward_model/accuracy"].item()) == (0.0, 0.0)


def test_shapes_that_differ_are_named() -> None:
    with refuses(BatchError, "chosen (2,)", "rejected (1,)"):
        pair_loss(torch.zeros(2), torch.zeros(1), global_pairs=2)
    with refuses(BatchError, "labels (1, 2)", "values (1, 1)"):
        label_loss(torch.zeros(1, 1), torch.zeros(1, 2), torch.zeros(1, 1), global_labels=1)
