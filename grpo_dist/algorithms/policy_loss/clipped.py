"""Losses that bound the ratio pi / pi_old: PPO's, and those that followed from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_dist.algorithms.policy_loss.inputs import POLICY_LOSS, PolicyInputs, clip_range

# A sequence's mean log-ratio above this is clipped whatever its exact value; verl's bound.
MAX_SEQUENCE_LOG_RATIO = 10.0


@POLICY_LOSS.register("vanilla")
def clipped_surrogate(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, with separate ranges (clip-higher) and dual clip.

    loss = max(-A ratio, -A clip(ratio, 1 - low, 1 + high)); for A < 0 also at most -A c.
    PPO (arXiv 1707.06347), clip-higher (DAPO, arXiv 2503.14476), dual clip (arXiv 1912.09729); as verl's `vanilla`.

    Metrics: `actor/pg_clipfrac` (share of tokens whose ratio is clipped), `actor/pg_clipfrac_lower` (share held by
    the dual clip), `actor/ppo_kl`.
    """
    ratio = batch.log_ratio.exp()
    surrogate, clipped = clip(ratio, batch.advantages, config)
    ceiling = -batch.advantages * config["clip_ratio_c"]
    negative = batch.advantages < 0
    token_loss = torch.where(negative, torch.minimum(surrogate, ceiling), surrogate)
    return batch.weighted(token_loss), batch.metrics(clipped, negative & (surrogate > ceiling))


@POLICY_LOSS.register("gspo")
def gspo(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of the sequence's ratio, exp(mean_t log ratio_t), on each of its tokens.

    GSPO (arXiv 2507.18071). The value is the sequence's, the gradient goes through each token's own log-prob
    (GSPO-token, equal in total). The paper's objective is loss_agg_mode seq-mean-token-mean, with clip ranges of 3e-4
    and 4e-4.
    """
    mean_log_ratio = batch.sequence_mean(batch.log_probs - batch.old_log_probs).detach()
    own = batch.log_probs - batch.log_probs.detach()
    ratio = torch.clamp(mean_log_ratio + own, max=MAX_SEQUENCE_LOG_RATIO).exp()
    token_loss, clipped = clip(ratio, batch.advantages, config)
    return batch.weighted(token_loss), batch.metrics(clipped, torch.zeros_like(clipped))


@POLICY_LOSS.register("geo_mean")
def geo_mean(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-A times the geometric mean of the sequence's clipped ratios, on each of its tokens.

    GMPO (arXiv 2507.20673): log-ratios are clipped to [-low, high], one-sidedly like PPO's. The paper's objective is
    loss_agg_mode seq-mean-token-mean; verl uses that mean whatever the mode. Importance weights enter by their
    geometric mean.
    """
    low, high = clip_range(config)
    sign = torch.sign(batch.advantages)
    clamped = torch.clamp(batch.log_ratio, -low, high)
    bounded = sign * torch.minimum(sign * batch.log_ratio, sign * clamped)
    token_loss = -batch.sequence_mean(batch.advantages) * batch.sequence_mean(bounded).exp()
    if batch.rollout_is_weights is not None:
        token_loss = token_loss * batch.sequence_mean(torch.log(batch.rollout_is_weights + 1e-10)).exp()
    outside = batch.log_ratio != clamped
    metrics = batch.metrics(outside & (batch.advantages > 0), outside & (batch.advantages < 0))
    return token_loss.expand_as(batch.response_mask), metrics


@POLICY_LOSS.register("cispo")
def cispo(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(ratio)) A log pi: the ratio's weight is clipped, no token's gradient is.

    CISPO (MiniMax-M1, arXiv 2506.13585).
    """
    low, high = clip_range(config)
    ratio = batch.log_ratio.exp().detach()
    weight = torch.clamp(ratio, 1 - low, 1 + high)
    clipped = weight != ratio
    token_loss = -weight * batch.advantages * batch.log_probs
    return batch.weighted(token_loss), batch.metrics(clipped, torch.zeros_like(clipped))


@POLICY_LOSS.register("sapo")
def sapo(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-A (4 / tau) sigmoid(tau (ratio - 1)): a soft gate in place of the clip, with one tau for each sign of A.

    SAPO (arXiv 2511.20347), `tau_pos`, `tau_neg`. The paper's objective is loss_agg_mode seq-mean-token-mean.
    """
    tau = torch.where(batch.advantages > 0, config["tau_pos"], config["tau_neg"])
    gate = torch.sigmoid(tau * (batch.log_ratio.exp() - 1)) * (4 / tau)
    none = torch.zeros_like(batch.response_mask)
    return batch.weighted(-gate * batch.advantages), batch.metrics(none, none)


def clip(ratio: Tensor, advantages: Tensor, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The larger of -A ratio and its clipped form, and where the clip decides."""
    low, high = clip_range(config)
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped
