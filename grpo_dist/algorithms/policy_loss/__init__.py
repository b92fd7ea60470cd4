"""Policy losses: from log-probs and advantages to a loss.

    clipped.py     the ratio is bounded: vanilla (PPO, clip-higher, dual clip), gspo, geo_mean, cispo, sapo
    unclipped.py   it is not: gpg, dro, dppo_tv, dppo_kl; the whole response's weighs its tokens: topr, vespo
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

__all__ = ["POLICY_LOSS", "PolicyInputs", "compute_policy_loss", "token_selection"]


def compute_policy_loss(
    columns: Mapping[str, Tensor],
    settings: ObjectiveSettings,
    *,
    global_tokens: float | Tensor | None = None,
    global_sequences: float | Tensor | None = None,
    global_prompts: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the aggregated policy loss, the first term of `policy_objective`, and its metrics.

    Args:
        columns: (N, T) tensors: `log_probs`, `old_log_probs` (nats), `advantages` and `response_mask`; where there are
            any, `rollout_is_weights` and `selected_tokens` (see `PolicyInputs`), and `prompt_weights` (see
            `agg_loss`). Only `log_probs` get a gradient.
        settings: of the loss; read is `actor`.
        global_tokens: tokens of the whole mini-batch; see `agg_loss`.
        global_sequences: sequences of the whole mini-batch; see `agg_loss`.
        global_prompts: prompts of the whole mini-batch; see `agg_loss`.

    Returns:
        (loss, metrics): a float32 scalar, and means over the masked tokens of this call.
    """
    actor, old_log_probs, weights = settings.actor, columns["old_log_probs"], columns.get("rollout_is_weights")
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
    token_loss, metrics = POLICY_LOSS.get(actor.policy_loss.loss_mode)(batch, settings.options)
    loss = agg_loss(
        token_loss,
        batch.response_mask,
        actor.loss_agg_mode,
        global_tokens=global_tokens,
        global_sequences=global_sequences,
        loss_scale_factor=actor.loss_scale_factor,
        prompt_weights=columns.get("prompt_weights"),
        global_prompts=global_prompts,
    )
    return loss, metrics
