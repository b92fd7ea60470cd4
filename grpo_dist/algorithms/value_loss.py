"""The clipped value loss of PPO, which trains a critic to foresee returns; GRPO has no critic."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_dist.algorithms.aggregate import agg_loss
from grpo_dist.algorithms.masking import masked_mean
from grpo_dist.errors import BatchError


def compute_value_loss(
    *,
    vpreds: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    global_tokens: float | Tensor | None = None,
    global_sequences: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """max((v - R)^2, (clip(v, v_old +- cliprange) - R)^2) / 2, aggregated. PPO (arXiv 1707.06347); as verl's.

    Args:
        vpreds: (N, T), the critic's values; carries the gradient.
        values: (N, T), its values before the update.
        returns: (N, T), what they should have been.
        response_mask: (N, T), 1 on the tokens that train.
        cliprange_value: how far a value may move.
        loss_agg_mode: see `aggregate`, as are the remaining arguments.

    Returns:
        (loss, metrics): a float32 scalar; and `critic/vf_loss`, the same without gradient, which like it adds up over
        micro-batches and ranks to the mini-batch's; and means over the tokens of this call: `critic/vf_clipfrac`, the
        share for which the clip decides, and `critic/vpred_mean`, the value.
    """
    for column, value in {"values": values, "returns": returns, "response_mask": response_mask}.items():
        if value.shape != vpreds.shape:
            raise BatchError(f"{column} {tuple(value.shape)} and vpreds {tuple(vpreds.shape)} differ")
    # before the squares, not after: the gradient of a masked inf is nan, and 0 * nan is nan
    mask = response_mask.bool()
    vpreds, values, returns = (
        column.float().where(mask, 0.0) for column in (vpreds, values.detach(), returns.detach())
    )
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    plain_error, clipped_error = (vpreds - returns).square(), (clipped - returns).square()
    loss = 0.5 * agg_loss(
        torch.maximum(plain_error, clipped_error),
        response_mask.float(),
        loss_agg_mode,
        global_tokens=global_tokens,
        global_sequences=global_sequences,
        loss_scale_factor=loss_scale_factor,
    )
    return loss, {
        "critic/vf_loss": loss.detach(),
        "critic/vf_clipfrac": masked_mean((clipped_error > plain_error).float(), response_mask),
        "critic/vpred_mean": masked_mean(vpreds, response_mask),
    }
