"""Token losses to one number, by counts of the whole mini-batch.

`agg_loss` sums over what it is given and divides by counts of the mini-batch (tokens or sequences, over all
micro-batches and all ranks). Micro-batches and ranks therefore only add up: how the work is cut changes nothing.

    token-mean           sum over all tokens / global tokens                       DAPO, BNPO
    seq-mean-token-mean  mean of each sequence's token mean / global sequences     GRPO as published
    seq-mean-token-sum   sum over all tokens / global sequences
"""

from __future__ import annotations

from torch import Tensor

from grpo_dist.errors import BatchError, ConfigError

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    global_tokens: float | Tensor | None = None,
    global_sequences: float | Tensor | None = None,
) -> Tensor:
    """Reduce (N, T) token losses to a scalar.

    Args:
        loss_mat: (N, T) float32.
        loss_mask: (N, T), 1 on the tokens that count. A fully masked sequence counts for nothing.
        loss_agg_mode: one of `LOSS_AGG_MODES`.
        global_tokens: tokens of the whole mini-batch, over all ranks. None: those of `loss_mask`.
        global_sequences: sequences with at least one token, likewise. None: those of `loss_mask`.

    Raises:
        BatchError: shapes differ.
        ConfigError: no such mode.
    """
    if loss_mat.shape != loss_mask.shape:
        raise BatchError(f"loss_mat {tuple(loss_mat.shape)} and loss_mask {tuple(loss_mask.shape)} differ")
    # where, not a product: a masked position may hold inf or nan, and 0 * nan is nan
    masked = loss_mat.where(loss_mask.bool(), 0.0)
    if loss_agg_mode == "token-mean":
        tokens = loss_mask.sum() if global_tokens is None else global_tokens
        return masked.sum() / _at_least_one(tokens)
    sequences = (loss_mask.sum(-1) > 0).sum() if global_sequences is None else global_sequences
    if loss_agg_mode == "seq-mean-token-mean":
        per_sequence = masked.sum(-1) / loss_mask.sum(-1).clamp_min(1)
        return per_sequence.sum() / _at_least_one(sequences)
    if loss_agg_mode == "seq-mean-token-sum":
        return masked.sum() / _at_least_one(sequences)
    raise ConfigError(f"actor_rollout_ref.actor.loss_agg_mode={loss_agg_mode}: not one of {', '.join(LOSS_AGG_MODES)}")


def _at_least_one(count: float | Tensor) -> float | Tensor:
    """A mini-batch without tokens has loss 0, not nan."""
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)
