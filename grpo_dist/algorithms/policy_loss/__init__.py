"""Policy losses: from log-probs and advantages to a loss.

    clipped.py     the ratio is bounded: vanilla (PPO, clip-higher, dual clip), gspo, geo_mean, cispo, sapo
    unclipped.py   it is not: gpg, dro, dppo_tv, dppo_kl
    covariance.py  a few tokens are treated apart: clip_cov, kl_cov

Call them through `compute_policy_loss`. inputs.py has their one signature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from grpo_dist.algorithms.aggregate import agg_loss

# The imports fill the registry.
from grpo_dist.algorithms.policy_loss import clipped, unclipped  # noqa: F401
from grpo_dist.algorithms.policy_loss.covariance import token_selection
from grpo_dist.algorithms.policy_loss.inputs import POLICY_LOSS, PolicyInputs
from grpo_dist.errors import BatchError

__all__ = ["DEFAULTS", "POLICY_LOSS", "PolicyInputs", "compute_policy_loss", "token_selection"]

# Options that are not given.
DEFAULTS = {
    "clip_ratio": 0.2,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "dro_beta": 0.1,
    "clip_cov_ratio": 2e-4,
    "clip_cov_lb": 1.0,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 2e-4,
    "ppo_kl_coef": 0.1,
}


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
    selected: Tensor | None = None,
    global_tokens: float | Tensor | None = None,
    global_sequences: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The aggregated policy loss called `name`.

    Args:
        name: a registered policy loss, or `pkg.module:function`.
        old_log_probs: (N, T), nats; the policy that is being improved on. No gradient.
        log_probs: (N, T), nats; the current policy, carries the gradient.
        advantages: (N, T).
        response_mask: (N, T), 1 on the tokens that train.
        loss_agg_mode: see `aggregate`.
        config: verl's option names; `DEFAULTS` has those that are not given.
        rollout_is_weights: (N, T) importance weights against the sampler, or None.
        selected: (N, T) bool from `token_selection`, or None.
        global_tokens: tokens of the whole mini-batch; see `agg_loss`.
        global_sequences: sequences of the whole mini-batch; see `agg_loss`.
        loss_scale_factor: see `agg_loss`.

    Returns:
        (loss, metrics): a float32 scalar, and means over the masked tokens of this call.

    Raises:
        BatchError: shapes differ.
        ConfigError: no such policy loss or aggregation mode.
    """
    columns = {"log_probs": log_probs, "advantages": advantages, "response_mask": response_mask}
    for column, value in columns.items():
        if value.shape != old_log_probs.shape:
            raise BatchError(f"{column} {tuple(value.shape)} and old_log_probs {tuple(old_log_probs.shape)} differ")
    mask = response_mask.bool()
    batch = PolicyInputs(
        old_log_probs.detach().float().where(mask, 0.0),
        log_probs.float().where(mask, 0.0),
        advantages.detach().float().where(mask, 0.0),
        response_mask.float(),
        None if rollout_is_weights is None else rollout_is_weights.detach().float().where(mask, 1.0),
        selected,
    )
    token_loss, metrics = POLICY_LOSS.get(name)(batch, {**DEFAULTS, **(config or {})})
    loss = agg_loss(
        token_loss,
        batch.response_mask,
        loss_agg_mode,
        global_tokens=global_tokens,
        global_sequences=global_sequences,
        loss_scale_factor=loss_scale_factor,
    )
    return loss, metrics
