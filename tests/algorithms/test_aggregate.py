"""Means over tokens, sequences and prompts, and ratios of probabilities, on paper numbers."""

import math

import pytest
import torch

from grpo_dist.algorithms import agg_loss
from grpo_dist.algorithms.aggregate import (
    LOSS_AGG_MODES,
    binary_kl,
    bounded_log_ratio,
    masked_mean,
    masked_whiten,
    token_entropy,
    token_log_probs,
)
from grpo_dist.errors import BatchError, ConfigError
from tests.golden import cases, tensors
from tests.messages import refuses

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize("case", cases("agg", tuple(set(LOSS_AGG_MODES) - {"prompt-mean"})))
def test_equals_verl(case: dict) -> None:
    scale = case["config"]["loss_scale_factor"]
    loss = agg_loss(**tensors(case["inputs"]), loss_agg_mode=case["name"], loss_scale_factor=scale)
    torch.testing.assert_close(loss, torch.tensor(case["outputs"]["loss"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 10 / 4),
        ("token-sum", 10),
        ("prompt-mean", (2 + 4) / 2),  # of one response a prompt
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum", 10 / 2),
        ("seq-mean-token-sum-norm", 10 / (2 * 3)),
    ],
)
def test_by_hand(mode: str, expected: float) -> None:
    """Whatever stands off the mask; of an empty batch it is 0."""
    loss = LOSS.where(MASK > 0, torch.tensor([[0.0], [torch.nan], [torch.inf]]))
    assert agg_loss(loss, MASK, mode).item() == pytest.approx(expected)
    assert agg_loss(loss, torch.zeros_like(MASK), mode).item() == 0


def test_a_mean_over_prompts_by_hand() -> None:
    """Losses 1 and 2, 3, 4 of one prompt's responses, 10 of another's: ((1 + 2 + 3 + 4) / 4 + 10) / 2; and in parts."""
    loss = torch.tensor([[1.0, 9, 9], [2, 3, 4], [10, 9, 9], [9, 9, 9]])
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]])
    weights = mask / torch.tensor([4.0, 4, 1, 1])[:, None]
    assert agg_loss(loss, mask, "prompt-mean", prompt_weights=weights).item() == pytest.approx((10 / 4 + 10) / 2)
    rows = [([i], {"prompt_weights": weights[[i]], "global_prompts": 2}) for i in range(4)]
    parts = [agg_loss(loss[row], mask[row], "prompt-mean", **more).item() for row, more in rows]
    assert parts == pytest.approx([1 / 8, 9 / 8, 5, 0])
    # half of the first prompt alone is in a mini-batch: the mean of what is there
    assert agg_loss(loss[:1], mask[:1], "prompt-mean", prompt_weights=weights[:1]).item() == pytest.approx(1)


def test_the_scale_is_a_constant_not_the_padding() -> None:
    mode = "seq-mean-token-sum-norm"
    assert agg_loss(LOSS, MASK, mode, loss_scale_factor=8).item() == pytest.approx(10 / (2 * 8))
    padded = [torch.nn.functional.pad(values, (0, 5)) for values in (LOSS, MASK)]
    assert agg_loss(*padded, mode, loss_scale_factor=8).item() == pytest.approx(10 / (2 * 8))


def test_log_prob_and_entropy_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    assert token_log_probs(logits, torch.tensor([1]), 1.0).item() == pytest.approx(math.log(0.25))
    assert token_entropy(logits, 1.0).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    cold = token_log_probs(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), 0.5)  # the temperature divides the logits
    assert cold.item() == pytest.approx(4.0 - math.log(math.exp(4) + 1), abs=1e-6)


def test_mean_and_whitening_by_hand_and_of_equal_values() -> None:
    """Mean 2, sample variance 2: +-1/sqrt 2. The float32 mean of 0.1 thrice is not 0.1."""
    values, mask = torch.tensor([[1.0, float("nan")], [3.0, 5.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert masked_mean(values, mask).item() == 2.0
    assert masked_mean(values, torch.zeros(2, 2)).item() == 0.0
    found = masked_whiten(values, mask)
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


def test_mistakes_are_named() -> None:
    with refuses(ConfigError, "token-median", "token-mean"):
        agg_loss(LOSS, MASK, "token-median")
    with refuses(BatchError, f"loss_mat {tuple(LOSS.shape)}", f"loss_mask {tuple(MASK[:2].shape)}"):
        agg_loss(LOSS, MASK[:2], "token-mean")
