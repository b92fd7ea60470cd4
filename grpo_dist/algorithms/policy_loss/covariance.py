"""Losses that treat apart the few tokens which cost the policy most of its entropy.

"The Entropy Mechanism of RL for Reasoning LMs" (arXiv 2505.22617): entropy falls by the covariance of log-prob and
advantage, and a tiny share of the tokens carries most of it. Which tokens these are is a property of the whole batch:
`token_selection` picks them once, before the batch is cut into micro-batches. A loss that is not told picks among the
tokens it sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_dist.algorithms.masking import masked_mean
from grpo_dist.algorithms.policy_loss.clipped import clip
from grpo_dist.algorithms.policy_loss.inputs import POLICY_LOSS, PolicyInputs
from grpo_dist.plugins.names import TOKEN_SELECTING_LOSSES


@POLICY_LOSS.register("clip_cov")
def clip_cov(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate without the selected tokens: a few, at random, of those with a high covariance.

    Metrics `actor/pg_clipfrac`, as in verl, and `actor/selected` are the share of these tokens.
    """
    selected = _selected("clip_cov", batch, config)
    token_loss, _ = clip(batch.log_ratio.exp(), batch.advantages, config)
    share = batch.share(selected)
    metrics = {"actor/pg_clipfrac": share, "actor/selected": share} | batch.ppo_kl()
    return batch.weighted(token_loss.where(~selected, 0.0)), metrics


@POLICY_LOSS.register("kl_cov")
def kl_cov(batch: PolicyInputs, config: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """-A ratio, and `ppo_kl_coef` |log ratio| on top for the tokens with the highest covariance.

    Metric `actor/ppo_kl` is the mean of |log ratio|, as in verl.
    """
    selected = _selected("kl_cov", batch, config)
    distance = batch.log_ratio.abs()
    token_loss = -batch.advantages * batch.log_ratio.exp()
    token_loss = torch.where(selected, token_loss + config["ppo_kl_coef"] * distance, token_loss)
    metrics = {"actor/ppo_kl": masked_mean(distance, batch.response_mask), "actor/selected": batch.share(selected)}
    return batch.weighted(token_loss), metrics


def token_selection(
    name: str,
    *,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Mapping[str, Any],
    generator: torch.Generator | None = None,
) -> Tensor | None:
    """(N, T) bool: the tokens of the whole batch that loss `name` treats apart, or None if it does not.

    `kl_cov`: the share `kl_cov_ratio` with the highest covariance (at least one token). `clip_cov`: as many tokens
    as the share `clip_cov_ratio`, at random (`generator`, else torch's own) among those with a covariance between
    `clip_cov_lb` and `clip_cov_ub`.
    """
    if name not in TOKEN_SELECTING_LOSSES:
        return None
    mask = response_mask.bool()
    centred = [values.detach()[mask] - values.detach()[mask].mean() for values in (log_probs, advantages)]
    covariance = centred[0] * centred[1]
    tokens = len(covariance)
    if name == "kl_cov":
        picked = covariance.topk(min(tokens, max(1, int(tokens * config["kl_cov_ratio"])))).indices
    else:
        candidates = ((covariance > config["clip_cov_lb"]) & (covariance < config["clip_cov_ub"])).nonzero().flatten()
        count = max(1, int(tokens * config["clip_cov_ratio"]))
        picked = candidates[torch.randperm(len(candidates), generator=generator).to(candidates.device)[:count]]
    chosen = torch.zeros(tokens, dtype=torch.bool, device=mask.device)
    chosen[picked] = True
    return torch.zeros_like(mask).masked_scatter(mask, chosen)


def _selected(name: str, batch: PolicyInputs, config: Mapping[str, Any]) -> Tensor:
    if batch.selected is not None:
        return batch.selected.bool()
    selected = token_selection(
        name,
        log_probs=batch.log_probs,
        advantages=batch.advantages,
        response_mask=batch.response_mask,
        config=config,
    )
    assert selected is not None
    return selected
