"""Policy losses: from log-probs and advantages to a per-token loss.

A policy loss takes (N, T) tensors and verl's option names and returns `(token_loss, metrics)`: token_loss (N, T)
float32, still to be aggregated, and metrics as means over the masked tokens of this call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_dist.algorithms.aggregate import agg_loss
from grpo_dist.algorithms.masking import masked_mean
from grpo_dist.errors import BatchError
from grpo_dist.registry import Registry

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]

POLICY_LOSS: Registry[PolicyLoss] = Registry("policy loss", "actor_rollout_ref.actor.policy_loss.loss_mode")

# A ratio of e^20 is a clipped token whatever its exact value; keeps exp() finite.
MAX_LOG_RATIO = 20.0


@POLICY_LOSS.register("vanilla")
def clipped_surrogate(
    old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, response_mask: Tensor, config: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, with separate ranges (clip-higher) and dual clip.

    loss = max(-A ratio, -A clip(ratio, 1 - low, 1 + high)); for A < 0 also at most -A c.
    PPO (arXiv 1707.06347), clip-higher (DAPO, arXiv 2503.14476), dual clip (arXiv 1912.09729); as verl's `vanilla`.

    Metrics: `actor/pg_clipfrac` (share of tokens whose ratio is clipped), `actor/pg_clipfrac_lower` (share held by
    the dual clip), `actor/ppo_kl` (mean of old - new log-prob, nats).
    """
    low = config["clip_ratio"] if config.get("clip_ratio_low") is None else config["clip_ratio_low"]
    high = config["clip_ratio"] if config.get("clip_ratio_high") is None else config["clip_ratio_high"]
    log_ratio = torch.clamp(log_probs - old_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    surrogate = torch.maximum(unclipped, clipped)
    ceiling = -advantages * config["clip_ratio_c"]
    negative = advantages < 0
    token_loss = torch.where(negative, torch.minimum(surrogate, ceiling), surrogate)
    metrics = {
        "actor/pg_clipfrac": masked_mean((clipped > unclipped).float(), response_mask),
        "actor/pg_clipfrac_lower": masked_mean((negative & (surrogate > ceiling)).float(), response_mask),
        "actor/ppo_kl": masked_mean(-log_ratio, response_mask),
    }
    return token_loss, metrics


def compute_policy_loss(
    name: str,
    *,
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any] | None = None,
    rollout_is_weights: Tensor | None = None,
    global_tokens: float | Tensor | None = None,
    global_sequences: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The aggregated policy loss called `name`.

    Args:
        name: a registered policy loss.
        old_log_probs: (N, T) float32, nats; the policy that is being improved on. No gradient.
        log_probs: (N, T) float32, nats; the current policy, carries the gradient.
        advantages: (N, T) float32.
        response_mask: (N, T), 1 on the tokens that train.
        loss_agg_mode: see `aggregate`.
        config: verl's option names; clip_ratio is 0.2 and clip_ratio_c 3.0 unless given.
        rollout_is_weights: (N, T) importance weights against the sampler, or None.
        global_tokens: tokens of the whole mini-batch; see `agg_loss`.
        global_sequences: sequences of the whole mini-batch; see `agg_loss`.

    Returns:
        (loss, metrics): a scalar, and means over the masked tokens of this call.

    Raises:
        BatchError: shapes differ.
        ConfigError: no such policy loss or aggregation mode.
    """
    for column, value in {"log_probs": log_probs, "advantages": advantages, "response_mask": response_mask}.items():
        if value.shape != old_log_probs.shape:
            raise BatchError(f"{column} {tuple(value.shape)} and old_log_probs {tuple(old_log_probs.shape)} differ")
    options = {"clip_ratio": 0.2, "clip_ratio_c": 3.0, **(config or {})}
    token_loss, metrics = POLICY_LOSS.get(name)(old_log_probs, log_probs, advantages, response_mask, options)
    if rollout_is_weights is not None:
        token_loss = token_loss * rollout_is_weights
    loss = agg_loss(
        token_loss, response_mask, loss_agg_mode, global_tokens=global_tokens, global_sequences=global_sequences
    )
    return loss, metrics
