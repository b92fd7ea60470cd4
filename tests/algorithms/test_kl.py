"""KL estimators on numbers worked out on paper; tests/fuzz has their formulas on random log-probs."""

import math

import pytest
import torch
from torch import Tensor

from grpo_dist.algorithms import kl_penalty
from grpo_dist.errors import BatchError, ConfigError
from tests.golden import cases
from tests.messages import refuses

NAMES = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
LN2 = math.log(2)
HALF, QUARTER = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()


@pytest.mark.parametrize("case", cases("kl", (*NAMES, "k1+", "k3+")))
def test_equals_verl_in_value_and_gradient(case: dict) -> None:
    log_probs = torch.tensor(case["inputs"]["log_prob"], requires_grad=True)
    kl = kl_penalty(case["name"], log_probs, torch.tensor(case["inputs"]["ref_log_prob"]))
    torch.testing.assert_close(kl.detach(), torch.tensor(case["outputs"]["kl"]), rtol=1e-5, atol=1e-6)
    if "grad" in case["outputs"]:
        kl.sum().backward()
        torch.testing.assert_close(log_probs.grad, torch.tensor(case["outputs"]["grad"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        *((name, LN2, 1) for name in ("k1", "kl", "abs")),
        *((name, LN2**2 / 2, LN2) for name in ("k2", "mse")),
        *((name, 0.5 + LN2 - 1, 0.5) for name in ("k3", "low_var_kl")),
        ("unbiased_k3", 1.25 * (0.5 + LN2 - 1), 1.25 * LN2),  # of an old probability of 0.4
    ],
)
def test_by_hand(name: str, value: float, gradient: float) -> None:
    """p = 0.5, q = 0.25: log p/q = ln 2. NAME+ has the gradient of d^2 / 2, which is d."""
    slopes = {name: gradient} | ({f"{name}+": LN2} if name in NAMES else {})
    for form, slope in slopes.items():
        p = HALF.clone().requires_grad_()
        kl = kl_penalty(form, p, QUARTER, old_log_probs=torch.tensor([[0.4]]).log())
        kl.sum().backward()
        assert kl.item() == pytest.approx(value)
        assert p.grad.item() == pytest.approx(slope)


def test_full_by_hand_and_its_gradient() -> None:
    """p = (3/4, 1/4), q = (1/2, 1/2): 3/4 ln 3/2 + 1/4 ln 1/2; logits may be shifted.

    d KL / d logit = p (log p/q - KL).
    """
    p, q = torch.tensor([[[0.75, 0.25]]]).log().add(3.0).requires_grad_(), torch.zeros(1, 1, 2)
    kl = kl_penalty("full", p, q)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl.shape == (1, 1)
    assert kl.item() == pytest.approx(expected, abs=1e-6)
    kl.sum().backward()
    gradient = [0.75 * (math.log(1.5) - expected), 0.25 * (math.log(0.5) - expected)]
    assert p.grad.flatten().tolist() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "p", "q", "value"), [("full", [0.0, -math.inf], [0.0, 0.0], LN2), ("k3", [-500.0], [0.0], 10.0)]
)
def test_what_cannot_be_stays_finite(name: str, p: list[float], q: list[float], value: float) -> None:
    """A token that is ruled out, and one that is next to."""
    log_probs = torch.tensor([p], requires_grad=True)
    kl = kl_penalty(name, log_probs, torch.tensor([q]))
    kl.sum().backward()
    assert kl.item() == pytest.approx(value)
    assert torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "k3+", "full"])
def test_bf16_is_computed_in_float32(name: str) -> None:
    p, q = torch.randn(2, 3, 4).to(torch.bfloat16), torch.randn(2, 3, 4).to(torch.bfloat16)
    kl = kl_penalty(name, p, q)
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl, kl_penalty(name, p.float(), q.float()))


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_sampled_estimators_are_the_exact_kl_on_average(name: str) -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.3, 0.3, 0.4]).log()
    expected = (p.exp() * (p - q)).sum()
    torch.testing.assert_close(kl_penalty("full", p, q), expected)
    torch.testing.assert_close((p.exp() * kl_penalty(name, p[None], q[None])[0]).sum(), expected)


def softmax_gradient(name: str) -> tuple[Tensor, Tensor]:
    """(the mean gradient of an estimator over what an old policy samples, the gradient of the KL), in logits."""
    logits = torch.tensor([0.4, -0.3, 1.1], requires_grad=True)
    old, q = torch.tensor([0.5, 0.2, 0.3]).log(), torch.tensor([0.25, 0.6, 0.15]).log()
    log_probs = torch.log_softmax(logits, -1)
    (old.exp() * kl_penalty(name, log_probs, q, old_log_probs=old)).sum().backward(retain_graph=True)
    assert logits.grad is not None
    (exact,) = torch.autograd.grad(kl_penalty("full", log_probs, q), logits)
    return logits.grad, exact


def test_unbiased_k3_has_the_gradient_of_the_kl_wherever_the_samples_are_from() -> None:
    found, exact = softmax_gradient("unbiased_k3")
    torch.testing.assert_close(found, exact)
    assert exact.abs().max() > 0.1
    for biased in ("k1", "k2", "k3", "k3+"):
        assert (softmax_gradient(biased)[0] - exact).abs().max() > 0.01, biased


@pytest.mark.parametrize("distance", [-15.0, -2.0, -0.1, 0.0, 0.3, 4.0, 15.0])
def test_its_gradient_is_that_of_the_formula(distance: float) -> None:
    """In float64, ratio and k3 differentiated as they stand; in float32 the terms in e^-d would leave rounding."""
    p = torch.tensor([[-3.0]], dtype=torch.float64, requires_grad=True)
    q, old = p.detach() - distance, torch.tensor([[-2.6]], dtype=torch.float64)
    (p - old).exp().mul((q - p).exp() - (q - p) - 1).sum().backward()
    found = p.detach().float().requires_grad_()
    kl_penalty("unbiased_k3", found, q, old_log_probs=old).sum().backward()
    assert found.grad.item() == pytest.approx(p.grad.item(), rel=1e-5, abs=1e-9)


def test_mistakes_are_named() -> None:
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
