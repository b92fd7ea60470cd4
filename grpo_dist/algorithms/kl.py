"""Per-token KL(policy || reference).

From the log-probs of the sampled tokens, two (N, T) tensors in nats (Schulman 2020, "Approximating KL Divergence",
joschu.net/blog/kl-approx.html), with d = log p - log q:

    name (alias)      value            as a loss
    k1 (kl)           d                its gradient has mean zero: it regularises nothing
    abs               |d|              a constant pull, whatever the distance
    k2 (mse)          d^2 / 2          the gradient of the KL
    k3 (low_var_kl)   e^-d + d - 1     unbiased in value and low in variance; its gradient is biased
    NAME+             that of NAME     the gradient of k2, straight through
    unbiased_k3       rho k3           the gradient of the KL, also of what p_old sampled; rho = p / p_old

or exactly, over the vocabulary: `full` takes logits or log-softmax, (..., V), and returns (...). Mask before reducing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_dist.algorithms.aggregate import bounded_log_ratio, check_shapes, tensor_fault
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.registry import Fault, Registry


def kl_fault(returned: Any, log_probs: Tensor, ref_log_probs: Tensor) -> Fault | None:
    """Return what is wrong with a KL estimator's values. Where log-probs are not finite, it is not its fault."""
    expected = f"a float tensor of shape {tuple(log_probs.shape)}, without nan and inf"
    problem = tensor_fault(returned, log_probs.shape, log_probs.isfinite() & ref_log_probs.isfinite())
    if not problem and log_probs.requires_grad and not returned.requires_grad:
        return "numbers without a gradient", f"{expected}; compute them from log_probs"
    return (problem, expected) if problem else None


KL: Registry[Callable[..., Tensor]] = Registry(
    "KL estimator", "actor_rollout_ref.actor.kl_loss_type", ("log_probs", "ref_log_probs"), kl_fault
)

# One token cannot dominate the KL term; verl's bound.
MAX_K3 = 10.0


@KL.register("k1", "kl")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Log p - log q: unbiased, high variance, can be negative."""
    return log_probs - ref_log_probs


@KL.register("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|log p - log q|."""
    return (log_probs - ref_log_probs).abs()


@KL.register("k2", "mse")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, low variance, the right gradient."""
    return 0.5 * (log_probs - ref_log_probs).square()


@KL.register("k3", "low_var_kl")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(r) - r - 1 with r = log q - log p: unbiased, >= 0. r is clamped to +-20 and the value to +-10, as in verl."""
    log_ratio = bounded_log_ratio(ref_log_probs, log_probs)
    return torch.clamp(log_ratio.exp() - log_ratio - 1, -MAX_K3, MAX_K3)


@KL.register("unbiased_k3")
def unbiased_k3(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return rho k3 with the gradient of both factors, rho = p / p_old. DeepSeek-V3.2 (arXiv 2512.02556).

    With d = log p - log q that gradient is rho (k3 + 1 - e^-d) = rho d times that of log p, which is rho times k2's. It
    is taken from there: the terms in e^-d, which cancel, would leave rounding, and where k3's value is bounded a wrong
    sign. In the paper, where the old policy has sampled, it is unbiased; here, where the sampler differs, it is with
    the sampler's log-probs as the old ones.
    """
    ratio = bounded_log_ratio(log_probs, old_log_probs).exp().detach()
    return ratio * _with_gradient_of_k2(k3(log_probs.detach(), ref_log_probs), log_probs, ref_log_probs)


@KL.register("full")
def full(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Sum over the vocabulary of p (log p - log q): exact, and so is its gradient. (..., V) -> (...) float32."""
    log_p, log_q = torch.log_softmax(logits.float(), -1), torch.log_softmax(ref_logits.float(), -1)
    difference = (log_p - log_q).where(~log_p.isneginf(), 0.0)  # a token that p rules out adds nothing
    return (log_p.exp() * difference).sum(-1)


def kl_penalty(
    name: str, log_probs: Tensor, ref_log_probs: Tensor, *, old_log_probs: Tensor | None = None, key: str = KL.key
) -> Tensor:
    """Per-token KL by the estimator called `name`, float32.

    Args:
        name: a name or alias of the table above, with or without `+`, or `pkg.module:function`.
        log_probs: (N, T) log-probs of the sampled tokens, nats; for `full` (..., V) logits or log-softmax.
        ref_log_probs: the same of the reference.
        old_log_probs: the same of the old policy, for unbiased_k3.
    """
    check_shapes("ref_log_probs", ref_log_probs, log_probs=log_probs)
    log_probs, ref_log_probs = log_probs.float(), ref_log_probs.float()
    if name == "unbiased_k3":
        if old_log_probs is None:
            raise ConfigError(f"{key}={name}: there is no policy that moves away from the old one here; use k3")
        return unbiased_k3(log_probs, ref_log_probs, old_log_probs.float())
    if not name.endswith("+"):
        return KL.get(name, key)(log_probs, ref_log_probs)
    if name in ("full+", "unbiased_k3+"):
        raise ConfigError(f"{key}={name}: the gradient of {name[:-1]} is that of the KL already; use {name[:-1]}")
    return _with_gradient_of_k2(KL.get(name[:-1], key)(log_probs.detach(), ref_log_probs), log_probs, ref_log_probs)


def _with_gradient_of_k2(value: Tensor, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    with_gradient = k2(log_probs, ref_log_probs)
    return value + with_gradient - with_gradient.detach()
