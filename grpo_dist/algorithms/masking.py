"""Masked means, whitening and discounted sums, log-probs and entropies of tokens under logits, bounded log ratios."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_dist.plugins.registry import described

# Keeps whitening finite where all values are equal; verl's value.
WHITEN_EPS = 1e-8


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of (N, T) `values` where `mask` is 1, detached; 0 where nothing is."""
    values = values.detach().where(mask.bool(), 0.0)
    return values.sum() / mask.sum().clamp_min(1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) over the masked entries, 0 elsewhere; sample variance.

    The sums are float64: the float32 mean of equal values differs from them, and whitening would enlarge that.
    """
    inside = mask.bool()
    count = inside.sum().clamp_min(1)
    counted = values.double().where(inside, 0.0)
    centred = (counted - counted.sum() / count).where(inside, 0.0)
    variance = centred.square().sum() / (count - 1).clamp_min(1)
    return (centred * torch.rsqrt(variance + WHITEN_EPS)).to(values.dtype)


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return to go, G_t = r_t + gamma G_{t+1}, of (N, T) rewards; 0 off the mask.

    Tokens off the mask (a tool's words) pass the return on undiscounted.
    """
    if gamma == 1.0:
        return rewards.flip(-1).cumsum(-1).flip(-1) * mask
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[-1])):
        running = rewards[:, t] + running * torch.where(mask[:, t] > 0, gamma, 1.0)
        returns[:, t] = running
    return returns * mask


def token_log_probs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Log-probs, in nats, of given tokens under softmax(logits / temperature).

    Args:
        logits: (..., V), any float type; the softmax runs in float32.
        token_ids: (...) int64.

    Returns:
        (...) float32.
    """
    logits = logits.float() / temperature
    return torch.gather(logits, -1, token_ids.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)


def token_entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): (..., V) -> (...) float32."""
    log_probs = torch.log_softmax(logits.float() / temperature, -1)
    return -(log_probs.exp() * log_probs).sum(-1)


# A ratio beyond e^20 is not worth telling apart: the token is all but impossible under one of the two models, and any
# clip range or threshold cuts it.
MAX_LOG_RATIO = 20.0


def bounded_log_ratio(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """The first less the second, element by element, nats; between -20 and 20."""
    return torch.clamp(log_probs - other_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)


# Keeps log(1 - p) finite for a token that is all but certain.
PROB_EPS = 1e-8


def binary_kl(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """KL(p || q) of this token or not, p log(p / q) + (1 - p) log((1 - p) / (1 - q)), from log p and log q; nats."""
    rest, other_rest = -torch.expm1(log_probs), -torch.expm1(other_log_probs)
    own = log_probs.exp() * bounded_log_ratio(log_probs, other_log_probs)
    return own + rest * torch.log((rest + PROB_EPS) / (other_rest + PROB_EPS))


def tensor_fault(value: Any, shape: torch.Size, where: Tensor | None = None) -> str:
    """Say how a value differs from a float tensor of this shape with finite numbers; "" if it does not.

    Args:
        where: not 0 at the numbers that matter; None: all do.
    """
    if not isinstance(value, Tensor) or value.shape != shape or not value.is_floating_point():
        return described(value)
    bad = ~value.detach().isfinite()
    if where is not None:
        bad &= where.bool()
    if not bad.any():
        return ""
    first = tuple(bad.nonzero()[0].tolist())
    return f"{value[first].item()} at {list(first)} ({int(bad.sum())} such numbers)"
