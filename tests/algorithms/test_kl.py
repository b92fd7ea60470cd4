import math

import pytest
import torch

from grpo_dist.algorithms import kl_penalty
from grpo_dist.algorithms.controllers import KLController
from grpo_dist.errors import BatchError, ConfigError
from tests.golden import cases
from tests.messages import refuses

NAMES = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")


@pytest.mark.parametrize("case", cases("kl", (*NAMES, "k1+", "k3+")))
def test_equals_verl_in_value_and_gradient(case: dict) -> None:
    log_probs = torch.tensor(case["inputs"]["log_prob"], requires_grad=True)
    kl = kl_penalty(case["name"], log_probs, torch.tensor(case["inputs"]["ref_log_prob"]))
    torch.testing.assert_close(kl.detach(), torch.tensor(case["outputs"]["kl"]), rtol=1e-5, atol=1e-6)
    if "grad" in case["outputs"]:
        kl.sum().backward()
        torch.testing.assert_close(log_probs.grad, torch.tensor(case["outputs"]["grad"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_plus_has_the_value_of_the_name_and_the_gradient_of_k2(name: str) -> None:
    """p = 0.5, q = 0.25: the gradient of d^2 / 2 is d = ln 2."""
    p, q = torch.tensor([[0.5]]).log().requires_grad_(), torch.tensor([[0.25]]).log()
    kl = kl_penalty(f"{name}+", p, q)
    assert kl.item() == pytest.approx(kl_penalty(name, p, q).item())
    kl.sum().backward()
    assert p.grad.item() == pytest.approx(math.log(2))


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
    assert p.grad.flatten().tolist() == pytest.approx(
        [0.75 * (math.log(1.5) - expected), 0.25 * (math.log(0.5) - expected)], abs=1e-6
    )


def test_full_survives_tokens_that_are_ruled_out() -> None:
    p = torch.tensor([[0.0, -math.inf]], requires_grad=True)
    kl = kl_penalty("full", p, torch.zeros(1, 2))
    kl.sum().backward()
    assert kl.item() == pytest.approx(math.log(2))
    assert torch.isfinite(p.grad).all()


def test_full_is_what_the_sampled_estimators_estimate() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.3, 0.3, 0.4]).log()
    for name in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * kl_penalty(name, p[None], q[None])[0]).sum(), kl_penalty("full", p, q))


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "k3+", "full"])
def test_bf16_is_computed_in_float32(name: str) -> None:
    p, q = torch.randn(2, 3, 4).to(torch.bfloat16), torch.randn(2, 3, 4).to(torch.bfloat16)
    kl = kl_penalty(name, p, q)
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl, kl_penalty(name, p.float(), q.float()))


def test_by_hand() -> None:
    """p = 0.5, q = 0.25: log p/q = ln 2."""
    p, q = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    assert kl_penalty("k1", p, q).item() == pytest.approx(math.log(2))
    assert kl_penalty("k2", p, q).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_penalty("k3", p, q).item() == pytest.approx(0.5 + math.log(2) - 1)


def test_k3_is_the_exact_kl_on_average() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    expected = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl_penalty("k3", p.log()[None], q.log()[None])[0]).sum(), expected)
    torch.testing.assert_close((p * kl_penalty("k1", p.log()[None], q.log()[None])[0]).sum(), expected)


def softmax_gradient(name: str) -> tuple[torch.Tensor, torch.Tensor]:
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


def test_unbiased_k3_by_hand() -> None:
    """p = 0.5, q = 0.25, p_old = 0.4: 1.25 (0.5 + ln 2 - 1), and the gradient 1.25 ln 2."""
    p, q, old = (torch.tensor([[x]]).log() for x in (0.5, 0.25, 0.4))
    kl = kl_penalty("unbiased_k3", p.requires_grad_(), q, old_log_probs=old)
    kl.sum().backward()
    assert kl.item() == pytest.approx(1.25 * (0.5 + math.log(2) - 1))
    assert p.grad.item() == pytest.approx(1.25 * math.log(2))


@pytest.mark.parametrize("distance", [-15.0, -2.0, -0.1, 0.0, 0.3, 4.0, 15.0])
def test_its_gradient_is_that_of_the_formula(distance: float) -> None:
    """In float64, ratio and k3 differentiated as they stand; in float32 the terms in e^-d would leave rounding."""
    p = torch.tensor([[-3.0]], dtype=torch.float64, requires_grad=True)
    q, old = p.detach() - distance, torch.tensor([[-2.6]], dtype=torch.float64)
    (p - old).exp().mul((q - p).exp() - (q - p) - 1).sum().backward()
    found = p.detach().float().requires_grad_()
    kl_penalty("unbiased_k3", found, q, old_log_probs=old).sum().backward()
    assert found.grad.item() == pytest.approx(p.grad.item(), rel=1e-5, abs=1e-9)


def test_unbiased_k3_needs_a_policy_that_moves() -> None:
    """In the reward there is none."""
    with refuses(ConfigError, "algorithm.kl_penalty=unbiased_k3", "use k3"):
        kl_penalty("unbiased_k3", torch.zeros(1, 1), torch.zeros(1, 1), key="algorithm.kl_penalty")
    with refuses(ConfigError, "kl_loss_type=unbiased_k3+", "use unbiased_k3"):
        kl_penalty("unbiased_k3+", torch.zeros(1, 1), torch.zeros(1, 1))


def test_k3_stays_finite() -> None:
    log_probs = torch.tensor([[-500.0]], requires_grad=True)
    kl = kl_penalty("k3", log_probs, torch.tensor([[0.0]]))
    kl.sum().backward()
    assert kl.item() == 10.0
    assert torch.isfinite(log_probs.grad).all()


def test_mistakes_are_named() -> None:
    with refuses(ConfigError, "kl_loss_type=k4"):
        kl_penalty("k4", torch.zeros(1, 1), torch.zeros(1, 1))
    with refuses(ConfigError, "kl_loss_type=full+", "use full"):
        kl_penalty("full+", torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    with refuses(BatchError, "log_probs (1, 1)", "ref_log_probs (1, 2)"):
        kl_penalty("k1", torch.zeros(1, 1), torch.zeros(1, 2))


def test_fixed_stays() -> None:
    controller = KLController(0.3)
    controller.update(100.0, 1000)
    assert controller.coef == 0.3


@pytest.mark.parametrize(("kl", "error"), [(0.11, 0.1), (0.05, -0.2), (1.0, 0.2), (0.1, 0.0)])
def test_adaptive_by_hand(kl: float, error: float) -> None:
    """Target 0.1: the relative error, at most 0.2 either way, times 500 sequences over a horizon of 1000."""
    controller = KLController(0.2, target_kl=0.1, horizon=1000)
    controller.update(kl, 500)
    assert controller.coef == pytest.approx(0.2 * (1 + error / 2))
