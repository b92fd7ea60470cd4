"""Token losses to one number, by counts of the whole mini-batch; and what else is computed of tokens and logits.

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

from typing import Any

import torch
from torch import Tensor

from grpo_dist.errors import BatchError, ConfigError
from grpo_dist.plugins.names import LOSS_AGG_MODES
from grpo_dist.plugins.registry import described


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
    check_shapes("loss_mask", loss_mask, loss_mat=loss_mat)
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


def check_shapes(name: str, wanted: Tensor, **columns: Tensor) -> None:
    """Check that columns have the shape of the column `name`."""
    for column, value in columns.items():
        if value.shape != wanted.shape:
            raise BatchError(f"{column} {tuple(value.shape)} and {name} {tuple(wanted.shape)} differ")


def _at_least_one(count: float | Tensor) -> float | Tensor:
    """A mini-batch without tokens has loss 0, not nan."""
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


# Keeps whitening finite where all values are equal; verl's value.
WHITEN_EPS = 1e-8


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of (N, T) `values` where `mask` is 1, detached; 0 where nothing is."""
    values = values.detach().where(mask.bool(), 0.0)
    return values.sum() / mask.sum().clamp_min(1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) over the masked entries, 0 elsewhere; sample variance.

    The sums are float64: the float32 mean of equal values differs from them, and whitening would enlarge that.
    """
    inside = mask.bool()
    count = inside.sum().clamp_min(1)
    counted = values.double().where(inside, 0.0)
    centred = (counted - counted.sum() / count).where(inside, 0.0)
    variance = centred.square().sum() / (count - 1).clamp_min(1)
    return (centred * torch.rsqrt(variance + WHITEN_EPS)).to(values.dtype)


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return to go, G_t = r_t + gamma G_{t+1}, of (N, T) rewards; 0 off the mask.

    Tokens off the mask (a tool's words) pass the return on undiscounted.
    """
    if gamma == 1.0:
        return rewards.flip(-1).cumsum(-1).flip(-1) * mask
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[-1])):
        running = rewards[:, t] + running * torch.where(mask[:, t] > 0, gamma, 1.0)
        returns[:, t] = running
    return returns * mask


def token_log_probs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Log-probs, (...) float32 in nats, of given tokens under softmax(logits / temperature).

    Args:
        logits: (..., V), any float type; the softmax runs in float32.
        token_ids: (...) int64.
    """
    logits = logits.float() / temperature
    return torch.gather(logits, -1, token_ids.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)


def token_entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): (..., V) -> (...) float32."""
    log_probs = torch.log_softmax(logits.float() / temperature, -1)
    return -(log_probs.exp() * log_probs).sum(-1)


# A ratio beyond e^20 is not worth telling apart: the token is all but impossible under one of the two models, and any
# clip range or threshold cuts it.
MAX_LOG_RATIO = 20.0


def bounded_log_ratio(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """The first less the second, element by element, nats; between -20 and 20."""
    return torch.clamp(log_probs - other_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)


# Keeps log(1 - p) finite for a token that is all but certain.
PROB_EPS = 1e-8


def binary_kl(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """KL(p || q) of this token or not, p log(p / q) + (1 - p) log((1 - p) / (1 - q)), from log p and log q; nats."""
    rest, other_rest = -torch.expm1(log_probs), -torch.expm1(other_log_probs)
    own = log_probs.exp() * bounded_log_ratio(log_probs, other_log_probs)
    return own + rest * torch.log((rest + PROB_EPS) / (other_rest + PROB_EPS))


def tensor_fault(value: Any, shape: torch.Size, where: Tensor | None = None) -> str:
    """Say how a value is no float tensor of this shape, finite `where` that is not 0 (None: everywhere); "": it is."""
    if not isinstance(value, Tensor) or value.shape != shape or not value.is_floating_point():
        return described(value)
    bad = ~value.detach().isfinite()
    if where is not None:
        bad &= where.bool()
    if not bad.any():
        return ""
    first = tuple(bad.nonzero()[0].tolist())
    return f"{value[first].item()} at {list(first)} ({int(bad.sum())} such numbers)"
