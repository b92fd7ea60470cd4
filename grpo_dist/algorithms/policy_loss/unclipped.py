"""Losses without PPO's clip: plain policy gradient, a quadratic penalty, trust regions on probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_dist.algorithms.masking import binary_kl
from grpo_dist.algorithms.policy_loss.inputs import POLICY_LOSS, PolicyInputs, clip_range


@POLICY_LOSS.register("gpg")
def gpg(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log pi: no ratio, no clip. GPG (arXiv 2504.02546)."""
    return batch.weighted(-batch.advantages * batch.log_probs), batch.ppo_kl()


@POLICY_LOSS.register("dro")
def dro(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-(A log pi - beta / 2 (log pi - log pi_old)^2), beta = `dro_beta`.

    Direct reward optimisation (arXiv 2405.19107), on tokens, as verl's `dro`.
    """
    difference = batch.log_probs - batch.old_log_probs
    token_loss = -(batch.log_probs * batch.advantages - 0.5 * config["dro_beta"] * difference.square())
    return batch.weighted(token_loss), batch.ppo_kl()


@POLICY_LOSS.register("dppo_tv")
def dppo_tv(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient within |p - p_old| <= clip range: tokens that go on out of it are masked.

    DPPO (arXiv 2602.04879) with the binary total variation; the ratio is truncated at `clip_ratio_c`.
    """
    low, high = clip_range(config)
    change = batch.log_probs.exp() - batch.old_log_probs.exp()
    return _trust_region(batch, config, change > high, change < -low)


@POLICY_LOSS.register("dppo_kl")
def dppo_kl(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """As `dppo_tv`, with the KL divergence of the two Bernoulli distributions (this token or not) as the region."""
    low, high = clip_range(config)
    old, new = batch.old_log_probs, batch.log_probs
    kl = binary_kl(old, new)
    # ~(kl <= bound), not kl > bound: a divergence that is not a number is outside
    return _trust_region(batch, config, ~(kl <= high) & ~(new <= old), ~(kl <= low) & ~(new >= old))


def _trust_region(
    batch: PolicyInputs, config: Mapping[str, Any], above: Tensor, below: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A sg(ratio) log pi on tokens that are inside, or that the advantage pulls back in.

    Metrics: `actor/pg_clipfrac` (share of tokens that are masked), `actor/pg_clipfrac_lower` (share of tokens that are
    not, and whose ratio is truncated), as in verl.
    """
    outside = torch.where(batch.advantages > 0, above, below).detach()
    ratio = batch.log_ratio.exp().detach()
    truncated = ratio.clamp_max(config["clip_ratio_c"])
    token_loss = (-batch.advantages * truncated * batch.log_probs).where(~outside, 0.0)
    return batch.weighted(token_loss), batch.metrics(outside, ~outside & (ratio > config["clip_ratio_c"]))
