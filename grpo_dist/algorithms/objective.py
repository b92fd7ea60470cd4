"""The objective of GRPO, whole.

For a group of responses to one prompt, sampled from the old policy and scored, GRPO minimises

    loss = aggregate( clipped_surrogate(log_probs, old_log_probs, advantages) )
         + kl_loss_coef  * aggregate( KL(policy || reference) )
         - entropy_coeff * aggregate( entropy )

The advantage is the reward relative to the group, or with a critic (PPO) to what that foresaw (see `advantage`). The
departures from DeepSeekMath's formula: the aggregate is a choice (`loss_agg_mode`; the paper's is seq-mean-token-mean),
the clip range may be asymmetric, and negative advantages are dual-clipped. All three terms use the SAME aggregate with
the counts of the whole mini-batch, so micro-batches and ranks only add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from grpo_dist.algorithms.aggregate import agg_loss
from grpo_dist.algorithms.correction import current_weights
from grpo_dist.algorithms.kl import kl_penalty
from grpo_dist.algorithms.masking import masked_mean
from grpo_dist.algorithms.policy_loss import compute_policy_loss
from grpo_dist.errors import BatchError


def policy_objective(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
    loss_mode: str,
    loss_agg_mode: str,
    options: Mapping[str, Any],
    kl_loss_type: str | None,
    kl_loss_coef: float,
    entropy_coeff: float,
    global_tokens: float | Tensor,
    global_sequences: float | Tensor,
    loss_scale_factor: float | None = None,
    exact_kl: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    selected: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    correction: Mapping[str, Any] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one micro-batch, ready for backward, and its metrics.

    Args:
        log_probs: (N, T) float32, nats; current policy, carries the gradient.
        old_log_probs: (N, T) float32, nats.
        advantages: (N, T) float32.
        response_mask: (N, T), 1 on the tokens that train.
        ref_log_probs: (N, T) float32, nats; None where the KL term needs none.
        entropy: (N, T) float32, nats, or None: no entropy term.
        loss_mode: policy loss.
        loss_agg_mode: aggregation mode of all terms.
        options: of the policy loss, by verl's names (clip_ratio, tau_pos, ...).
        kl_loss_type: KL estimator; None: no KL term.
        kl_loss_coef: weight of the KL term.
        entropy_coeff: weight of the entropy bonus.
        global_tokens: response tokens of the mini-batch, all ranks.
        global_sequences: sequences of the mini-batch, all ranks.
        loss_scale_factor: see `agg_loss`.
        exact_kl: (N, T) float32, nats: what kl_loss_type `full` needs, computed next to the vocabulary.
        rollout_is_weights: (N, T) importance weights against the sampler, or None.
        selected: (N, T), 1 on the tokens that the policy loss treats apart, or None.
        rollout_log_probs: (N, T) float32, nats; the sampler's. None: `old_log_probs` are (bypass mode).
        correction: options of `current_weights`, or None: no such weights.

    Returns:
        (loss, metrics). Summed over the micro-batches of all ranks, loss and `actor/pg_loss` are the mini-batch's;
        the other metrics are means over the tokens of this call.
    """
    counts: dict[str, Any] = {
        "global_tokens": global_tokens,
        "global_sequences": global_sequences,
        "loss_scale_factor": loss_scale_factor,
    }
    if correction is not None:
        sampler = old_log_probs if rollout_log_probs is None else rollout_log_probs
        rollout_is_weights = current_weights(log_probs, sampler, response_mask, correction)
    loss, metrics = compute_policy_loss(
        loss_mode,
        old_log_probs=old_log_probs,
        log_probs=log_probs,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=options,
        rollout_is_weights=rollout_is_weights,
        selected=selected,
        **counts,
    )
    metrics["actor/pg_loss"] = loss.detach()
    if kl_loss_type is not None:
        kl = _kl(kl_loss_type, log_probs, ref_log_probs, exact_kl, response_mask)
        loss = loss + kl_loss_coef * agg_loss(kl, response_mask, loss_agg_mode, **counts)
        metrics["actor/kl_loss"] = masked_mean(kl, response_mask)
    if entropy is not None:
        loss = loss - entropy_coeff * agg_loss(entropy, response_mask, loss_agg_mode, **counts)
        metrics["actor/entropy"] = masked_mean(entropy, response_mask)
    return loss, metrics


def _kl(name: str, log_probs: Tensor, ref_log_probs: Tensor | None, exact_kl: Tensor | None, mask: Tensor) -> Tensor:
    """(N, T) KL per token: a term that is wanted is computed or refused, never left out.

    Raises:
        BatchError: the column that it needs is not there.
    """
    needed, column = (exact_kl, "exact_kl") if name == "full" else (ref_log_probs, "ref_log_probs")
    if needed is None:
        raise BatchError(f"kl_loss_type={name} needs {column}, which is not there")
    if name == "full":
        return needed
    # masked before the estimator, not after: the gradient of an infinite distance is nan, and 0 * nan is nan
    policy, reference = (values.where(mask.bool(), 0.0) for values in (log_probs, needed))
    return kl_penalty(name, policy, reference)
