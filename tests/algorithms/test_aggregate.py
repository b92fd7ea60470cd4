"""Means over tokens, sequences and prompts, ratios of probabilities and KL estimators, on paper numbers."""

import math

import pytest
import torch

from grpo_dist.algorithms import agg_loss, kl_penalty
from grpo_dist.algorithms.aggregate import (
    binary_kl,
    bounded_log_ratio,
    masked_mean,
    masked_whiten,
    token_entropy,
    token_log_probs,
)
from grpo_dist.errors import BatchError, ConfigError
from tests.messages import refuses

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


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


def test_a_mean_over_prompts_of_which_half_is_there_is_the_mean_of_what_is_there() -> None:
    part, mask, weights = LOSS[1:], MASK[1:], torch.full((2, 3), 1 / 4)
    assert agg_loss(part, mask, "prompt-mean", prompt_weights=weights).item() == pytest.approx(4)


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


def test_means_ratios_and_the_kl_of_a_token_by_hand() -> None:
    """0.5 against 0.25: 0.5 ln 2 + 0.5 ln 2/3; a sure token against 0.25: ln 4."""
    p, q = torch.tensor([0.5, 1.0, 0.25]).log(), torch.tensor([0.25, 0.25, 0.25]).log()
    expected = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), math.log(4), 0.0]
    torch.testing.assert_close(binary_kl(p, q), torch.tensor(expected))
    found = bounded_log_ratio(torch.tensor([-1.0, -50.0, 0.0]), torch.tensor([-3.0, 0.0, -50.0]))
    assert found.tolist() == [2.0, -20.0, 20.0]
    assert found.exp().isfinite().all()


def test_mistakes_are_named() -> None:
    with refuses(ConfigError, "token-median", "token-mean"):
        agg_loss(LOSS, MASK, "token-median")
    with refuses(BatchError, f"loss_mat {tuple(LOSS.shape)}", f"loss_mask {tuple(MASK[:2].shape)}"):
        agg_loss(LOSS, MASK[:2], "token-mean")


# --- KL estimators ---------------------------------------------------------------------------------------------------
LN2 = math.log(2)


NAMES = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
LN2 = math.log(2)
HALF, QUARTER = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        *((name, LN2, 1) for name in ("k1", "kl", "abs")),
        *((name, LN2**2 / 2, LN2) for name in ("k2", "mse")),
        *((name, 0.5 + LN2 - 1, 0.5) for name in ("k3", "low_var_kl")),
        ("unbiased_k3", 1.25 * (0.5 + LN2 - 1), 1.25 * LN2),  # of an old probability of 0.4
    ],
)
def test_kl_by_hand(name: str, value: float, gradient: float) -> None:
    """p = 0.5, q = 0.25: log p/q = ln 2. NAME+ has the gradient of d^2 / 2, which is d."""
    slopes = {name: gradient} | ({f"{name}+": LN2} if name in NAMES else {})
    for form, slope in slopes.items():
        p = HALF.clone().requires_grad_()
        kl = kl_penalty(form, p, QUARTER, old_log_probs=torch.tensor([[0.4]]).log())
        kl.sum().backward()
        assert kl.item() == pytest.approx(value)
        assert p.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("name", "p", "q", "value"), [("full", [0.0, -math.inf], [0.0, 0.0], LN2), ("k3", [-500.0], [0.0], 10.0)]
)
def test_what_cannot_be_stays_finite(name: str, p: list[float], q: list[float], value: float) -> None:
    log_probs = torch.tensor([p], requires_grad=True)
    kl = kl_penalty(name, log_probs, torch.tensor([q]))
    kl.sum().backward()
    assert kl.item() == pytest.approx(value)
    assert torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("name", ["k3+", "full"])
def test_bf16_is_computed_in_float32(name: str) -> None:
    p, q = torch.randn(2, 2, 3, 4).to(torch.bfloat16)
    kl = kl_penalty(name, p, q)
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl, kl_penalty(name, p.float(), q.float()))


@pytest.mark.parametrize("distance", [-15.0, -2.0, -0.1, 0.0, 0.3, 4.0, 15.0])
def test_its_gradient_is_that_of_the_formula(distance: float) -> None:
    """In float64, ratio and k3 differentiated as they stand; in float32 the terms in e^-d would leave rounding."""
    p = torch.tensor([[-3.0]], dtype=torch.float64, requires_grad=True)
    q, old = p.detach() - distance, torch.tensor([[-2.6]], dtype=torch.float64)
    (p - old).exp().mul((q - p).exp() - (q - p) - 1).sum().backward()
    found = p.detach().float().requires_grad_()
    kl_penalty("unbiased_k3", found, q, old_log_probs=old).sum().backward()
    assert found.grad.item() == pytest.approx(p.grad.item(), rel=1e-5, abs=1e-9)


def test_mistakes_in_a_kl_are_named() -> None:
    zeros = torch.zeros(1, 1)
    with refuses(ConfigError, "algorithm.kl_penalty=unbiased_k3", "use k3"):  # in the reward no policy moves
        kl_penalty("unbiased_k3", zeros, zeros, key="algorithm.kl_penalty")
    with refuses(ConfigError, "kl_loss_type=unbiased_k3+", "use unbiased_k3"):
        kl_penalty("unbiased_k3+", zeros, zeros)
    with refuses(ConfigError, "kl_loss_type=k4"):
        kl_penalty("k4", zeros, zeros)
    with refuses(ConfigError, "kl_loss_type=full+", "use full"):
        kl_penalty("full+", torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    with refuses(BatchError, "log_probs (1, 1)", "ref_log_probs (1, 2)"):
        kl_penalty("k1", zeros, torch.zeros(1, 2))
