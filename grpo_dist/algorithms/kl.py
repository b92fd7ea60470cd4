"""Per-token KL(policy || reference) from the log-probs of the sampled tokens (k1, k2, k3).

Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html). Every estimator takes two (N, T)
float32 tensors in nats and returns (N, T); multiply by the mask before reducing. As a loss, k2's gradient is that of
the KL; k1's gradient has mean zero, so it regularises nothing; k3 is unbiased in value and low in variance.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_dist.errors import BatchError
from grpo_dist.registry import Registry

KL: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry("KL estimator", "actor_rollout_ref.actor.kl_loss_type")

# exp() of more than this is not worth telling apart: the token is all but impossible under one of the two models.
MAX_LOG_RATIO = 20.0
# One token cannot dominate the KL term; verl's bound.
MAX_K3 = 10.0


@KL.register("k1", "kl")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Log p - log q: unbiased, high variance, can be negative."""
    return log_probs - ref_log_probs


@KL.register("k2", "mse")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, low variance, the right gradient."""
    return 0.5 * (log_probs - ref_log_probs).square()


@KL.register("k3", "low_var_kl")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(r) - r - 1 with r = log q - log p: unbiased, >= 0. r is clamped to +-20 and the value to +-10, as in verl."""
    log_ratio = torch.clamp(ref_log_probs - log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.clamp(log_ratio.exp() - log_ratio - 1, -MAX_K3, MAX_K3)


def kl_penalty(name: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Per-token KL by the estimator called `name`.

    Raises:
        BatchError: the shapes differ.
        ConfigError: no such estimator.
    """
    if log_probs.shape != ref_log_probs.shape:
        raise BatchError(f"log_probs {tuple(log_probs.shape)} and ref_log_probs {tuple(ref_log_probs.shape)} differ")
    return KL.get(name)(log_probs, ref_log_probs)
