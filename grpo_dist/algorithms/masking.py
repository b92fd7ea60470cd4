"""Masked means, and the log-prob and entropy of tokens under logits."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of (N, T) `values` where `mask` is 1, detached; 0 where nothing is."""
    values = values.detach().where(mask.bool(), 0.0)
    return values.sum() / mask.sum().clamp_min(1)


def token_log_probs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Log-probs, in nats, of given tokens under softmax(logits / temperature).

    Args:
        logits: (..., V), any float type; the softmax runs in float32.
        token_ids: (...) int64.
        temperature: the sampling temperature, > 0.

    Returns:
        (...) float32.
    """
    logits = logits.float() / temperature
    return torch.gather(logits, -1, token_ids.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)


def token_entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): (..., V) -> (...) float32."""
    log_probs = torch.log_softmax(logits.float() / temperature, -1)
    return -(log_probs.exp() * log_probs).sum(-1)
