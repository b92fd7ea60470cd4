"""Ratios of probabilities, on paper numbers."""

import math

import pytest
import torch

from grpo_dist.algorithms.aggregate import (
    binary_kl,
    bounded_log_ratio,
    masked_mean,
    masked_whiten,
    token_entropy,
    token_log_probs,
)


def test_log_prob_and_entropy_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    assert token_log_probs(logits, torch.tensor([1]), 1.0).item() == pytest.approx(math.log(0.25))
    assert token_entropy(logits, 1.0).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[2.0, 0.0]])
    expected = 4.0 - math.log(math.exp(4) + 1)
    assert token_log_probs(logits, torch.tensor([0]), 0.5).item() == pytest.approx(expected, abs=1e-6)


def test_masked_mean_ignores_what_is_masked() -> None:
    values = torch.tensor([[1.0, float("nan")], [3.0, 5.0]])
    assert masked_mean(values, torch.tensor([[1.0, 0.0], [1.0, 0.0]])).item() == 2.0
    assert masked_mean(values, torch.zeros(2, 2)).item() == 0.0


def test_whitening_by_hand_and_of_equal_values() -> None:
    """Mean 2, sample variance 2: +-1/sqrt 2. The float32 mean of 0.1 thrice is not 0.1."""
    values = torch.tensor([[1.0, float("nan")], [3.0, 5.0]])
    found = masked_whiten(values, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([[-(0.5**0.5), 0.0], [0.5**0.5, 0.0]]))
    assert masked_whiten(torch.full((7, 3), 0.1), torch.ones(7, 3)).abs().max() < 1e-10


def test_the_kl_of_a_token_or_not_by_hand() -> None:
    """0.5 against 0.25: 0.5 ln 2 + 0.5 ln 2/3; a sure token against 0.25: ln 4."""
    p, q = torch.tensor([0.5, 1.0, 0.25]).log(), torch.tensor([0.25, 0.25, 0.25]).log()
    expected = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), math.log(4), 0.0]
    torch.testing.assert_close(binary_kl(p, q), torch.tensor(expected))


def test_the_ratio_is_bounded_on_both_sides() -> None:
    found = bounded_log_ratio(torch.tensor([-1.0, -50.0, 0.0]), torch.tensor([-3.0, 0.0, -50.0]))
    assert found.tolist() == [2.0, -20.0, 20.0]
    assert found.exp().isfinite().all()
