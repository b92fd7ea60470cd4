"""Why sampler and trainer give the same tokens other probabilities: the KL between them, split by cause."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_dist.algorithms.masking import bounded_log_ratio


def mismatch_by_cause(
    *,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    is_stale: Tensor | None = None,
    filtered: bool = False,
) -> dict[str, float]:
    """What each cause adds to `rollout_corr/kl`, KL(sampler || trainer), in nats per token.

    - old weights: what tokens that older weights have sampled have more than the others have on average.
    - filters: top_p and the like leave the sampler a share m of the trainer's probability. Over tokens that it has
      sampled, pi_trainer / pi_sampler has the mean m, and it would be 1 without filters; so they add -log m (a little
      more where m differs between tokens).
    - rest: types and kernels.

    Args:
        old_log_probs: (N, T) float32, nats; the trainer's.
        rollout_log_probs: (N, T) float32, nats; the sampler's.
        response_mask: (N, T), 1 on the tokens that train.
        is_stale: (N, T) bool, tokens that older weights have sampled; None: there cannot be any.
        filtered: whether filters cut the sampler's distribution.

    Returns:
        `mismatch/old_weights` (with `is_stale`), `mismatch/filters` (if `filtered`) and `mismatch/rest`, which add up
        to the KL; without tokens nothing. If all tokens are stale there is nothing to compare them with, and the rest
        is in what old weights add.
    """
    mask = response_mask.bool()
    log_ratio = bounded_log_ratio(old_log_probs.float(), rollout_log_probs.float())[mask]
    if not len(log_ratio):
        return {}
    current = log_ratio if is_stale is None else log_ratio[~is_stale[mask]]
    causes = {"filters": -log_ratio.exp().mean().log()} if filtered else {}
    rest = -current.mean() - sum(causes.values()) if len(current) else torch.zeros(())
    causes["rest"] = rest
    if is_stale is not None:
        causes["old_weights"] = -log_ratio.mean() - sum(causes.values())
    return {f"mismatch/{name}": float(value) for name, value in causes.items()}
