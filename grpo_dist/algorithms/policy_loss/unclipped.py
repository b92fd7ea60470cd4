"""Losses without PPO's clip: plain policy gradient, a quadratic penalty, trust regions on probabilities, and weights by
the ratio of the whole response.
"""

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


@POLICY_LOSS.register("topr")
def topr(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log pi where A >= 0, and -sg(min(W, 1)) A log pi where A < 0, W = pi(y) / pi_old(y) of the whole response.

    Tapered off-policy REINFORCE (arXiv 2503.14286): good responses are imitated however unlikely they have become, bad
    ones are let go of. Metric `actor/pg_clipfrac`: share of tokens whose weight is cut to 1.
    """
    log_ratio, bad = batch.sequence_log_ratio.detach(), batch.advantages < 0
    weight = torch.where(bad, log_ratio.clamp_max(0).exp(), 1.0)
    clipped = bad & (log_ratio > 0)
    token_loss = -weight * batch.advantages * batch.log_probs
    return batch.weighted(token_loss), batch.metrics(clipped, torch.zeros_like(clipped))


@POLICY_LOSS.register("vespo")
def vespo(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(W^k exp(lambda (1 - W))) A log pi, W = pi(y) / pi_old(y) of the whole response.

    VESPO (arXiv 2602.10693): the weight is 1 on policy and falls off on both sides, with `vespo_k_pos` and
    `vespo_lambda_pos` where A >= 0, `vespo_k_neg` and `vespo_lambda_neg` where A < 0. The paper's W is against the
    sampler: set bypass_mode. Importance weights multiply the loss as everywhere here; TRL puts them into W.
    """
    good, log_ratio = batch.advantages >= 0, batch.sequence_log_ratio.detach()
    k = torch.where(good, config["vespo_k_pos"], config["vespo_k_neg"])
    decay = torch.where(good, config["vespo_lambda_pos"], config["vespo_lambda_neg"])
    weight = (k * log_ratio + decay * (1 - log_ratio.exp())).exp()
    return batch.weighted(-weight * batch.advantages * batch.log_probs), batch.ppo_kl()
