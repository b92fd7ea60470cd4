"""Policy losses: from log-probs and advantages to a loss.

    clipped.py     the ratio is bounded: vanilla (PPO, clip-higher, dual clip), gspo, geo_mean, cispo, sapo
    unclipped.py   it is not: gpg, dro, dppo_tv, dppo_kl
    covariance.py  a few tokens are treated apart: clip_cov, kl_cov

Call them through `compute_policy_loss`. inputs.py has their one signature.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from grpo_dist.algorithms.aggregate import agg_loss

# The imports fill the registry.
from grpo_dist.algorithms.policy_loss import clipped, unclipped  # noqa: F401
from grpo_dist.algorithms.policy_loss.covariance import token_selection
from grpo_dist.algorithms.policy_loss.inputs import POLICY_LOSS, PolicyInputs
from grpo_dist.algorithms.settings import ObjectiveSettings
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
    columns: Mapping[str, Tensor],
    settings: ObjectiveSettings,
    *,
    global_tokens: float | Tensor | None = None,
    global_sequences: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the aggregated policy loss, the first term of `policy_objective`, and its metrics.

    Args:
        columns: (N, T) tensors: `log_probs`, `old_log_probs` (nats), `advantages` and `response_mask`; where there are
            any, `rollout_is_weights` and `selected_tokens` (see `PolicyInputs`). Only `log_probs` get a gradient.
        settings: of the loss; read are `loss_mode`, `loss_agg_mode`, `options` and `loss_scale_factor`.
        global_tokens: tokens of the whole mini-batch; see `agg_loss`.
        global_sequences: sequences of the whole mini-batch; see `agg_loss`.

    Returns:
        (loss, metrics): a float32 scalar, and means over the masked tokens of this call.
    """
    old_log_probs, weights = columns["old_log_probs"], columns.get("rollout_is_weights")
    for name in ("log_probs", "advantages", "response_mask"):
        if columns[name].shape != old_log_probs.shape:
            shapes = f"{name} {tuple(columns[name].shape)} and old_log_probs {tuple(old_log_probs.shape)}"
            raise BatchError(f"{shapes} differ")
    mask = columns["response_mask"].bool()
    batch = PolicyInputs(
        old_log_probs.detach().float().where(mask, 0.0),
        columns["log_probs"].float().where(mask, 0.0),
        columns["advantages"].detach().float().where(mask, 0.0),
        columns["response_mask"].float(),
        None if weights is None else weights.detach().float().where(mask, 1.0),
        columns.get("selected_tokens"),
    )
    token_loss, metrics = POLICY_LOSS.get(settings.loss_mode)(batch, {**DEFAULTS, **settings.options})
    loss = agg_loss(
        token_loss,
        batch.response_mask,
        settings.loss_agg_mode,
        global_tokens=global_tokens,
        global_sequences=global_sequences,
        loss_scale_factor=settings.loss_scale_factor,
    )
    return loss, metrics
