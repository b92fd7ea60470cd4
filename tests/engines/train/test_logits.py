"""Values and gradients of a chunk of logits, as they are and compiled, against autograd over plain formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_dist.algorithms import kl_penalty
from grpo_dist.algorithms.aggregate import token_entropy, token_log_probs
from grpo_dist.engines.train.lm_head import HeadValues, TopTokens, logits_gradient, token_values

M, V, TEMPERATURE = 5, 37, 0.7
TERMS = [(False, False), (True, False), (False, True), (True, True)]


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, those of a reference, tokens, and gradients of log-probs, entropies and KL."""
    generator = torch.Generator().manual_seed(3)
    logits, reference = (4 * torch.randn(M, V, generator=generator) for _ in range(2))
    return logits, reference, torch.randint(0, V, (M,), generator=generator), torch.randn(3, M, generator=generator)


def plain(entropies: bool, kl: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Values, and the gradient of the logits divided by the temperature."""
    logits, reference, targets, upstream = inputs()
    scaled = (logits / TEMPERATURE).requires_grad_()
    values = [token_log_probs(scaled, targets, 1.0)]
    values += [token_entropy(scaled, 1.0)] if entropies else []
    values += [kl_penalty("full", scaled, reference / TEMPERATURE)] if kl else []
    weights = [upstream[0], *([upstream[1]] if entropies else []), *([upstream[2]] if kl else [])]
    loss = sum((value * weight).sum() for value, weight in zip(values, weights, strict=True))
    return [value.detach() for value in values], torch.autograd.grad(loss, scaled)[0]  # type: ignore[arg-type]


def computed(entropies: bool, kl: bool, dtype: torch.dtype, compute: Any = lambda f: f) -> tuple[Any, torch.Tensor]:
    logits, reference, targets, upstream = inputs()
    logits, other = logits.to(dtype), reference.to(dtype) if kl else None
    values = compute(token_values)(logits, targets, TEMPERATURE, other, entropies=entropies)
    gradients = HeadValues(upstream[0], upstream[1] if entropies else None, upstream[2] if kl else None)
    return values, compute(logits_gradient)(logits, targets, TEMPERATURE, other, values, gradients)


@pytest.mark.parametrize(("entropies", "kl"), TERMS)
def test_values_and_gradients_are_those_of_plain_formulas(entropies: bool, kl: bool) -> None:
    expected, expected_gradient = plain(entropies, kl)
    values, gradient = computed(entropies, kl, torch.float32)
    found = [value for name, value in values._asdict().items() if value is not None and name != "sums"]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)
    logits, *_ = inputs()
    torch.testing.assert_close(values.sums, torch.logsumexp(logits / TEMPERATURE, -1), rtol=1e-5, atol=1e-5)


def test_a_kl_over_the_tokens_that_a_teacher_tells() -> None:
    """As if there were no others; beside it their probability, and gradients of log-probs too."""
    logits, reference, targets, upstream = inputs()
    told = torch.log_softmax(reference, -1).topk(4)
    top = TopTokens(told.indices, told.values / TEMPERATURE)
    scaled = (logits / TEMPERATURE).requires_grad_()
    among = scaled.gather(1, top.ids)
    expected = kl_penalty("full", among, top.log_probs)
    log_probs = token_log_probs(scaled, targets, 1.0)
    loss = (expected * upstream[2]).sum() + (log_probs * upstream[0]).sum()
    (gradient,) = torch.autograd.grad(loss, scaled)
    values = token_values(logits, targets, TEMPERATURE, None, entropies=False, top=top)
    torch.testing.assert_close(values.exact_kl, expected.detach(), rtol=1e-5, atol=1e-5)
    mass = torch.softmax(scaled, -1).gather(1, top.ids).sum(1)
    torch.testing.assert_close(values.mass, mass.detach(), rtol=1e-5, atol=1e-6)
    upstreams = HeadValues(upstream[0], None, upstream[2])
    found = logits_gradient(logits, targets, TEMPERATURE, None, values, upstreams, top)
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5)


def test_the_squared_norm_of_the_gradient_of_a_log_prob() -> None:
    logits, _, targets, _ = inputs()
    values = token_values(logits, targets, TEMPERATURE, None, entropies=False, gradient_norms=True)
    scaled = (logits / TEMPERATURE).requires_grad_()
    gradient = torch.autograd.grad(token_log_probs(scaled, targets, 1.0).sum(), scaled)[0]
    torch.testing.assert_close(values.gradient_norms, gradient.square().sum(1), rtol=1e-5, atol=1e-6)
    assert values.entropies is None


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_they_are_the_same(dtype: torch.dtype) -> None:
    """By Inductor, which fuses all of it."""
    own, own_gradient = computed(True, True, dtype)
    values, gradient = computed(True, True, dtype, torch.compile)
    for mine, theirs in zip(values, own, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert gradient.dtype == dtype
    off = (gradient.float() - own_gradient.float()).norm() / own_gradient.float().norm()
    assert off < (1e-5 if dtype == torch.float32 else 1e-2)


def test_values_of_some_tokens() -> None:
    values = HeadValues(torch.arange(4.0), torch.arange(4.0) + 10)
    part = values.part(slice(1, 3))
    assert part.log_probs.tolist() == [1, 2]
    assert part.sums is None
    assert part.entropies is not None
    assert part.entropies.tolist() == [11, 12]
