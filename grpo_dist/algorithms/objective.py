"""The objective of GRPO, whole.

For a group of responses to one prompt, sampled from the old policy and scored, GRPO minimises

    loss = aggregate( clipped_surrogate(log_probs, old_log_probs, advantages) )
         + kl_loss_coef  * aggregate( KL(policy || reference) )
         - entropy_coeff * aggregate( entropy )
         + observation_coeff * mean over the tokens of tools and environments ( -log_probs )

The advantage is the reward relative to the group, or with a critic (PPO) to what that foresaw (see `advantage`). The
departures from DeepSeekMath's formula: the aggregate is a choice (`loss_agg_mode`; the paper's is seq-mean-token-mean),
the clip range may be asymmetric, and negative advantages are dual-clipped. The first three terms use the SAME
aggregate; all are divided by counts of the whole mini-batch, so micro-batches and ranks only add up. The last term is
ECHO's (arXiv 2605.24517): an agent's policy learns to foresee what its actions lead to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from grpo_dist.algorithms.aggregate import agg_loss, masked_mean
from grpo_dist.algorithms.correction import current_weights, off_policy_mask
from grpo_dist.algorithms.kl import kl_penalty
from grpo_dist.algorithms.policy_loss import compute_policy_loss
from grpo_dist.algorithms.settings import TOP_LOG_PROBS, ObjectiveSettings
from grpo_dist.errors import BatchError

SUMS = ("actor/pg_loss", "actor/observation_loss")


def policy_objective(
    columns: Mapping[str, Tensor],
    settings: ObjectiveSettings,
    *,
    global_tokens: float | Tensor,
    global_sequences: float | Tensor,
    global_prompts: float | Tensor | None = None,
    global_observations: float | Tensor = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one micro-batch, ready for backward, and its metrics.

    Args:
        columns: (N, T) float32 tensors, log-probs and entropies in nats: `log_probs` of the current policy, which carry
            the gradient, `response_mask`, 1 on the tokens that train, those of `settings.columns`; `entropy` where it
            is a term, and `exact_kl`, computed next to the vocabulary, where kl_loss_type is `full`.
        global_tokens: response tokens of the mini-batch, all ranks.
        global_sequences: sequences of the mini-batch, all ranks.
        global_prompts: the sum of `prompt_weights`, all ranks; for loss_agg_mode prompt-mean.
        global_observations: the sum of `observation_mask`, all ranks; for observation_coeff.

    Returns:
        (loss, metrics). Summed over the micro-batches of all ranks, loss and the metrics in `SUMS` are the
        mini-batch's; the other metrics are means over the tokens of this call.
    """
    counts: dict[str, Any] = {"global_tokens": global_tokens, "global_sequences": global_sequences}
    counts["global_prompts"] = global_prompts
    actor, log_probs, mask = settings.actor, columns["log_probs"], columns["response_mask"]
    old_log_probs = log_probs.detach() if settings.on_policy else columns["old_log_probs"]
    read = {**columns, "old_log_probs": old_log_probs}
    if settings.correction is not None:
        sampler = columns.get("rollout_log_probs", old_log_probs)  # in bypass mode the old log-probs are the sampler's
        read["rollout_is_weights"] = current_weights(log_probs, sampler, mask, settings.correction)
    metrics: dict[str, Tensor] = {}
    if settings.off_policy_threshold is not None:
        sampler, threshold = columns["rollout_log_probs"], settings.off_policy_threshold
        kept = off_policy_mask(log_probs, sampler, columns["advantages"], mask, threshold)
        read["rollout_is_weights"] = kept * read.get("rollout_is_weights", 1)
        metrics["actor/off_policy_masked_fraction"] = masked_mean(1 - kept, mask)
    loss, own = compute_policy_loss(read, settings, **counts)
    metrics |= own | {"actor/pg_loss": loss.detach()}

    def aggregate(values: Tensor) -> Tensor:
        scale, weights = actor.loss_scale_factor, columns.get("prompt_weights")
        return agg_loss(values, mask, actor.loss_agg_mode, loss_scale_factor=scale, prompt_weights=weights, **counts)

    if actor.use_kl_loss:
        kl = _kl(read, settings)
        if settings.teaches_itself:
            kl = kl * columns["teacher_mask"]
            metrics["actor/self_distilled_fraction"] = masked_mean(columns["teacher_mask"], mask)
        if settings.by_top_tokens:
            of_top = columns[TOP_LOG_PROBS]  # of a rank without rows (N, T)
            teachers = of_top.exp().sum(-1) if of_top.dim() == 3 else of_top
            metrics["actor/teacher_top_mass"] = masked_mean(teachers, mask)
            metrics["actor/policy_top_mass"] = masked_mean(columns["top_mass"], mask)
        loss = loss + actor.kl_loss_coef * aggregate(kl)
        metrics["actor/kl_loss"] = masked_mean(kl, mask)
    if actor.computes_entropy:
        entropy = _needed(columns, "entropy", f"entropy_coeff={actor.entropy_coeff}")
        loss = loss - actor.entropy_coeff * aggregate(entropy)
        metrics["actor/entropy"] = masked_mean(entropy, mask)
    if actor.observation_coeff:
        observed = _needed(columns, "observation_mask", f"observation_coeff={actor.observation_coeff}")
        surprise = agg_loss(-log_probs, observed, "token-mean", global_tokens=global_observations)
        loss = loss + actor.observation_coeff * surprise
        metrics["actor/observation_loss"] = surprise.detach()
    return loss, metrics


def _kl(columns: Mapping[str, Tensor], settings: ObjectiveSettings) -> Tensor:
    name, asked = settings.actor.kl_loss_type, f"kl_loss_type={settings.actor.kl_loss_type}"
    if settings.exact_kl:
        return _needed(columns, "exact_kl", asked)
    # masked before the estimator, not after: the gradient of an infinite distance is nan, and 0 * nan is nan
    mask, reference = columns["response_mask"].bool(), _needed(columns, "ref_log_probs", asked)
    log_probs, old = (columns[column].where(mask, 0.0) for column in ("log_probs", "old_log_probs"))
    return kl_penalty(name, log_probs, reference.where(mask, 0.0), old_log_probs=old)


def _needed(columns: Mapping[str, Tensor], name: str, asked: str) -> Tensor:
    """Return a column: a term that is asked for is computed or refused, never left out."""
    if name not in columns:
        raise BatchError(f"{asked} needs {name}, which is not there")
    return columns[name]
