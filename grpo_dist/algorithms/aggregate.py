"""Token losses to one number, by counts of the whole mini-batch.

`agg_loss` sums over what it is given and divides by counts of the mini-batch (tokens or sequences, over all
micro-batches and all ranks). Micro-batches and ranks therefore only add up: how the work is cut changes nothing.

    token-mean               sum over all tokens / global tokens                              DAPO, BNPO
    token-sum                sum over all tokens
    prompt-mean              sum over prompts of the mean over all tokens of their responses / global prompts   ScaleRL
    seq-mean-token-mean      sum over sequences of their token mean / global sequences        GRPO as published
    seq-mean-token-sum       sum over all tokens / global sequences
    seq-mean-token-sum-norm  sum over all tokens / (global sequences * loss_scale_factor)     Dr. GRPO
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_dist.errors import BatchError, ConfigError
from grpo_dist.plugins.names import LOSS_AGG_MODES


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    global_tokens: float | Tensor | None = None,
    global_sequences: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
    prompt_weights: Tensor | None = None,
    global_prompts: float | Tensor | None = None,
) -> Tensor:
    """Reduce (N, T) token losses to a scalar.

    Args:
        loss_mat: (N, T) floats; summed in float32.
        loss_mask: (N, T), 1 on the tokens that count. A fully masked sequence counts for nothing.
        loss_agg_mode: one of `LOSS_AGG_MODES`.
        global_tokens: tokens of the whole mini-batch, over all ranks. None: those of `loss_mask`.
        global_sequences: sequences with at least one token, likewise. None: those of `loss_mask`.
        loss_scale_factor: for seq-mean-token-sum-norm, a constant length such as the longest possible response.
            None: T, which is only right where T is that constant.
        prompt_weights: (N, T), for prompt-mean: 1 / number of tokens of the prompt's responses. None: each row is its
            prompt's only response, so that the prompts are the sequences.
        global_prompts: the sum of these weights over the whole mini-batch, the number of its prompts. None: that of
            `prompt_weights`.
    """
    if loss_mat.shape != loss_mask.shape:
        raise BatchError(f"loss_mat {tuple(loss_mat.shape)} and loss_mask {tuple(loss_mask.shape)} differ")
    if loss_agg_mode not in LOSS_AGG_MODES:
        modes = ", ".join(LOSS_AGG_MODES)
        raise ConfigError(f"actor_rollout_ref.actor.loss_agg_mode={loss_agg_mode}: not one of {modes}")
    # where, not a product: a masked position may hold inf or nan, and 0 * nan is nan
    masked = loss_mat.float().where(loss_mask.bool(), 0.0)
    if loss_agg_mode == "token-sum":
        return masked.sum()
    if loss_agg_mode == "token-mean":
        tokens = loss_mask.sum() if global_tokens is None else global_tokens
        return masked.sum() / _at_least_one(tokens)
    if loss_agg_mode == "prompt-mean" and prompt_weights is not None:
        weights = prompt_weights.float().where(loss_mask.bool(), 0.0)
        prompts = torch.as_tensor(weights.sum() if global_prompts is None else global_prompts)
        return (masked * weights).sum() / torch.where(prompts > 0, prompts, 1.0)  # a part of a prompt is less than 1
    sequences = (loss_mask.sum(-1) > 0).sum() if global_sequences is None else global_sequences
    per_sequence = masked.sum(-1)
    if loss_agg_mode in ("seq-mean-token-mean", "prompt-mean"):
        per_sequence = per_sequence / loss_mask.sum(-1).clamp_min(1)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        per_sequence = per_sequence / (loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return per_sequence.sum() / _at_least_one(sequences)


def _at_least_one(count: float | Tensor) -> float | Tensor:
    """A mini-batch without tokens has loss 0, not nan."""
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)
