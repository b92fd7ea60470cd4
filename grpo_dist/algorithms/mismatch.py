"""Why sampler and trainer give the same tokens other probabilities: the KL between them, split by cause."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from grpo_dist.algorithms.masking import bounded_log_ratio


def mismatch_by_cause(
    *,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    is_stale: Tensor | None = None,
    lacks_routes: Tensor | None = None,
    filtered: bool = False,
) -> dict[str, float]:
    """What each cause adds to `rollout_corr/kl`, KL(sampler || trainer), in nats per token.

    - old weights: what tokens that older weights have sampled have more than the others have on average.
    - filters: top_p and the like leave the sampler a share m of the trainer's probability. Over tokens that it has
      sampled, pi_trainer / pi_sampler has the mean m, and it would be 1 without filters; so they add -log m (a little
      more where m differs between tokens).
    - routes: what sequences with tokens whose experts were not recorded have more than the others on average.
    - rest: types and kernels.

    Args:
        old_log_probs: (N, T) float32, nats; the trainer's.
        rollout_log_probs: (N, T) float32, nats; the sampler's.
        response_mask: (N, T), 1 on the tokens that train.
        is_stale: (N, T) bool, tokens that older weights have sampled; None: there cannot be any.
        lacks_routes: (N,) bool, sequences with such tokens; None: experts are not replayed.
        filtered: whether filters cut the sampler's distribution.

    Returns:
        `mismatch/old_weights` (with `is_stale`), `mismatch/routes` (with `lacks_routes`), `mismatch/filters` (if
        `filtered`) and `mismatch/rest`, which add up to the KL; without tokens nothing. If all tokens are stale, or all
        others lack routes, there is nothing to compare them with, and the rest is in what these add.
    """
    mask = response_mask.bool()
    log_ratio = bounded_log_ratio(old_log_probs.float(), rollout_log_probs.float())[mask]
    if not len(log_ratio):
        return {}
    current = torch.ones_like(mask) if is_stale is None else ~is_stale
    routed = current if lacks_routes is None else current & ~lacks_routes[:, None]
    filters = -log_ratio.exp().mean().log() if filtered else torch.zeros(())
    # the mean of tokens of which only the first cause can be true, then of more; where there are none nothing is added
    means = [filters]
    for chosen in (routed[mask], current[mask]):
        means.append(-log_ratio[chosen].mean() if chosen.any() else means[-1])
    means.append(-log_ratio.mean())
    named = {"filters": filtered, "rest": True, "routes": lacks_routes is not None, "old_weights": is_stale is not None}
    values = [filters, *(after - before for before, after in pairwise(means))]
    return {
        f"mismatch/{name}": float(value)
        for (name, is_given), value in zip(named.items(), values, strict=True)
        if is_given
    }
