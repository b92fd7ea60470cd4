"""Rollout correction: the sampler is not quite the policy that trains.

The sampler has its own kernels, and with asynchronous training older weights. With lambda_t = log pi_old - log
pi_rollout of each token (clamped to +-20), two remedies, alone or together:

    importance weights (`rollout_is`)   token: w_t = e^lambda_t;  sequence: w = e^(sum of lambda)
        truncated at `rollout_is_threshold` = C          TIS (Yao et al. 2025)
        zero outside "lower_upper"                       IcePop (Ring-1T, arXiv 2510.18855)
    rejection (`rollout_rs`)            tokens or whole sequences leave the mask; a comma-separated list of
        token_k1|k2|k3|kpop             each token by its own divergence
        seq_sum_k1|k2|k3                the sequence by the sum over its tokens
        seq_mean_k1|k2|k3               by the mean: with k1 the geometric mean of the ratios is bounded
        seq_max_k2|k3                   by its worst token

k1 = -lambda is bounded by ratios pi_rollout / pi_old, the inverse of the weights ("0.5_2.0"; one number C > 1 means 1/C
to C); k2 = lambda^2 / 2, k3 = e^lambda - 1 - lambda and kpop are bounded above by one number. kpop is the larger of the
KLs, one way and the other, of this token or not under both policies (KPop, ringtech.notion.site/kpop). Other option
names and formulas are verl's (`algorithm.rollout_correction`).

Two more masks depend on the advantage; what they leave out still counts in the loss's mean, as in their papers:

    `second_moment_mask`    M2PO: tokens of the batch, decided before the update, once there are advantages
    `off_policy_mask`       DeepSeek-V3.2: sequences, decided by the policy as it trains
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from grpo_dist.algorithms.aggregate import MAX_LOG_RATIO, binary_kl, bounded_log_ratio, check_shapes, masked_mean
from grpo_dist.errors import ConfigError

KEY = "algorithm.rollout_correction"
LEVELS = ("token", "sequence")
REJECTIONS = (
    *(f"{what}_{k}" for what in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
    "token_kpop",
)


def compute_rollout_correction(
    *,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Weights for the policy loss, the mask that is left, and diagnostics.

    Args:
        old_log_probs: (N, T) float32, nats; the trainer's log-probs of the sampled tokens.
        rollout_log_probs: (N, T) float32, nats; the sampler's.
        response_mask: (N, T), 1 on the tokens that train.
        rollout_rs: names of `REJECTIONS`, comma-separated, or None.
        rollout_rs_threshold: a bound for all of them, or one each, comma-separated.

    Returns:
        (weights, mask, metrics): weights (N, T) float32, 1 off the mask, or None without `rollout_is`; mask (N, T)
        like `response_mask`; metrics under `training/rollout_*` and `rollout_corr/*`, always.
    """
    check_shapes("old_log_probs", old_log_probs, rollout_log_probs=rollout_log_probs, response_mask=response_mask)
    mask = response_mask.bool()
    old, rollout = (values.float().where(mask, 0.0) for values in (old_log_probs, rollout_log_probs))
    log_ratio = bounded_log_ratio(old, rollout)
    metrics = _diagnostics(old, rollout, log_ratio, mask)
    kept = mask.clone()
    for name, bounds in read_rejections(rollout_rs, rollout_rs_threshold):
        accepted = _accepted(name, bounds, old, rollout, mask)
        kept &= accepted
        metrics[f"rollout_corr/{name}_masked_fraction"] = float(masked_mean((~accepted).float(), mask))
    if rollout_rs:
        metrics["rollout_corr/rollout_rs_masked_fraction"] = float(masked_mean((~kept).float(), mask))
    weights = None
    if rollout_is is not None:
        weights = _importance_weights(old - rollout, mask, rollout_is, rollout_is_threshold)
        metrics |= _weight_metrics(weights, old - rollout, mask, rollout_is)
        if read_weight_bounds(rollout_is_threshold)[0] is not None:  # weights out of bounds are 0, others never
            metrics["rollout_corr/rollout_is_oob_ratio"] = float(masked_mean((weights == 0).float(), mask))
        if rollout_is_batch_normalize:
            weights = _normalised(weights, mask, rollout_is)
    return weights, response_mask * kept, metrics


def current_weights(
    log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, config: Mapping[str, Any]
) -> Tensor:
    """Weights between the policy being trained, as it moves, and the sampler.

    For bypass mode, where there is no old policy to compare with, and for a batch that is one optimizer step, where the
    old policy is the one being trained.

    Args:
        log_probs: (N, T) float32, nats; the current policy. The weights carry no gradient.

    Returns:
        (N, T) float32 weights of the token losses, 0 on rejected tokens, which still count in the loss's mean (verl
        leaves them out of it, with a mean per micro-batch).
    """
    weights, kept, _ = compute_rollout_correction(
        old_log_probs=log_probs.detach(), rollout_log_probs=rollout_log_probs, response_mask=response_mask, **config
    )
    return kept.float() if weights is None else weights * kept


def second_moment_mask(
    old_log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, threshold: float
) -> Tensor:
    """Return 0 on the tokens with the largest lambda^2, so many that its mean over the others is at most `threshold`.

    M2PO (arXiv 2510.01161, algorithm 1). Only tokens that PPO's clip could hold count and may get 0: those that sampler
    and trainer differ on in the direction of their advantage. The paper takes the policy as it trains, here it is the
    old one, as in AReaL (which looks at no advantage): the mean is over all tokens of the batch, and the same for all
    mini-batches. Tokens as far apart as the nearest that gets 0 get it too, so that the order of rows changes nothing.

    Args:
        old_log_probs: (N, T) float32, nats; the trainer's.
        rollout_log_probs: (N, T) float32, nats; the sampler's.
        advantages: (N, T) float32.
        response_mask: (N, T), 1 on the tokens that train.
        threshold: the bound, nats^2; 0.04 in the paper.

    Returns:
        (N, T) float32 factors of the token losses, 1 off the mask.
    """
    mask = response_mask.bool()
    log_ratio = bounded_log_ratio(old_log_probs, rollout_log_probs).double().where(mask, 0.0)
    moments = log_ratio.square().where(mask & (advantages.sign() * log_ratio.sign() > 0), 0.0)
    ascending = moments[moments > 0].sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=mask.device)
    beyond = ascending[means > threshold]  # means of ascending numbers never fall, so these are the largest
    return (moments < beyond[0] if len(beyond) else torch.ones_like(mask)).float()


def off_policy_mask(
    log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, threshold: float
) -> Tensor:
    """Return 0 on tokens with a negative advantage of sequences whose mean of log(pi_rollout / pi) is over `threshold`.

    Off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556), whose old policy is the sampler's as it reports
    itself. The mean is over the tokens of a sequence that train: of an episode in all of its branches.

    Arguments and result are those of `second_moment_mask`, but for `log_probs`, (N, T) float32, nats, of the current
    policy, to which the mask gives no gradient, and `threshold`, in nats per token.
    """
    mask = response_mask.bool()
    distance = bounded_log_ratio(rollout_log_probs, log_probs.detach()).where(mask, 0.0)
    mean = distance.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)
    return 1 - (mask & (advantages < 0) & (mean > threshold)).float()


def read_bounds(threshold: float | str, *, key: str) -> tuple[float | None, float]:
    """(lower, upper) from 2.0, "2.0" (lower None) or "0.5_2.0"."""
    try:
        numbers = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        numbers = []
    ascending = all(a < b for a, b in pairwise(numbers))
    if not 1 <= len(numbers) <= 2 or not ascending or not all(0 < n < math.inf for n in numbers):
        raise ConfigError(f"{key}={threshold}: a positive number, or two as lower_upper such as 0.5_2.0")
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


def read_weight_bounds(threshold: float | str) -> tuple[float | None, float]:
    """`read_bounds` of `rollout_is_threshold`, whose upper bound is at least 1, the weight of a token without mismatch.

    YAML reads 0.5_5 as the number 0.55, which is refused here.
    """
    key = f"{KEY}.rollout_is_threshold"
    lower, upper = read_bounds(threshold, key=key)
    if upper < 1:
        raise ConfigError(
            f"{key}={threshold}: the upper bound must be at least 1; two bounds such as 0.5_5.0 need the .0"
        )
    return lower, upper


def read_rejections(
    rollout_rs: str | None, threshold: float | str | None
) -> list[tuple[str, tuple[float | None, float]]]:
    """The names of `rollout_rs`, each with its (lower, upper)."""
    if not rollout_rs:
        return []
    names = [name.strip() for name in rollout_rs.split(",")]
    unknown = [name for name in names if name not in REJECTIONS]
    if unknown:
        raise ConfigError(f"{KEY}.rollout_rs={unknown[0]}: not one of {', '.join(REJECTIONS)}")
    texts = [text.strip() for text in str(threshold).split(",")]
    if threshold is None or len(texts) not in (1, len(names)):
        raise ConfigError(
            f"{KEY}.rollout_rs_threshold={threshold}: one threshold for all, or one each for {rollout_rs}"
        )
    bounds = []
    for name, text in zip(names, texts * len(names) if len(texts) == 1 else texts, strict=False):
        lower, upper = read_bounds(text, key=f"{KEY}.rollout_rs_threshold")
        if name.endswith("k1"):
            lower = 1 / upper if lower is None else lower
            if lower >= upper:
                raise ConfigError(
                    f"{KEY}.rollout_rs_threshold={text}: one number C bounds the ratios of {name} by 1/C and C; give a "
                    "number above 1, or two as lower_upper such as 0.5_2.0"
                )
        elif lower is not None:
            raise ConfigError(f"{KEY}.rollout_rs_threshold={text}: {name} takes one upper bound")
        bounds.append((name, (lower, upper)))
    return bounds


def _importance_weights(log_ratio: Tensor, mask: Tensor, level: str, threshold: float | str) -> Tensor:
    if level not in LEVELS:
        raise ConfigError(f"{KEY}.rollout_is={level}: not one of {', '.join(LEVELS)}")
    lower, upper = read_weight_bounds(threshold)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    weights = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if lower is None:
        weights = weights.clamp_max(upper)
    else:
        weights = weights.where((weights >= lower) & (weights <= upper), 0.0)
    return weights.where(mask, 1.0)


def _normalised(weights: Tensor, mask: Tensor, level: str) -> Tensor:
    """Divided by their mean over the batch's tokens or sequences."""
    per_unit = mask.float() if level == "token" else mask / mask.sum(-1, keepdim=True).clamp_min(1)
    mean = (weights * per_unit).sum() / per_unit.sum().clamp_min(1)
    return (weights / mean.clamp_min(1e-8)).where(mask, 1.0)


def kpop(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """The larger of KL(p || q) and KL(q || p) of this token or not, element by element, nats."""
    return torch.maximum(binary_kl(log_probs, other_log_probs), binary_kl(other_log_probs, log_probs))


def _accepted(name: str, bounds: tuple[float | None, float], old: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """Return which tokens one of `rollout_rs` leaves in the mask, (N, T) bool."""
    scope, k = name.rsplit("_", 1)
    value = _divergence(k, old, rollout).where(mask, 0.0)
    if scope == "seq_max":
        value = value.amax(-1, keepdim=True)
    elif scope != "token":
        value = value.sum(-1, keepdim=True) / (mask.sum(-1, keepdim=True).clamp_min(1) if scope == "seq_mean" else 1)
    lower, upper = bounds
    if lower is None:
        return (value <= upper).expand_as(mask)
    # k1: the bounds are ratios pi_rollout / pi_old
    return ((value >= math.log(lower)) & (value <= math.log(upper))).expand_as(mask)


def _divergence(k: str, old: Tensor, rollout: Tensor) -> Tensor:
    if k == "kpop":
        return kpop(old, rollout)
    log_ratio = bounded_log_ratio(old, rollout)
    if k == "k1":
        return -log_ratio
    return 0.5 * log_ratio.square() if k == "k2" else log_ratio.exp() - 1 - log_ratio


def _diagnostics(old: Tensor, rollout: Tensor, log_ratio: Tensor, mask: Tensor) -> dict[str, float]:
    """Return how far sampler and trainer are apart; never to be trusted to be 0."""
    tokens = mask.sum(-1)
    rows = tokens > 0
    count = tokens[rows].clamp_min(1)
    diff = (old.exp() - rollout.exp()).abs()[mask]
    log_ppl_old, log_ppl_rollout = (
        (-values.sum(-1)[rows] / count).clamp_max(MAX_LOG_RATIO) for values in (old, rollout)
    )
    sequence = log_ratio.sum(-1)[rows].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    ratio = log_ratio.exp()
    weights = ratio[mask]
    values = {
        "training/rollout_probs_diff_mean": diff.mean() if len(diff) else diff.sum(),
        "training/rollout_probs_diff_max": diff.max() if len(diff) else diff.sum(),
        "training/rollout_probs_diff_std": diff.std() if len(diff) > 1 else torch.zeros(()),
        "rollout_corr/kl": masked_mean(-log_ratio, mask),  # KL(rollout || old): tokens are the sampler's
        "rollout_corr/k3_kl": masked_mean(ratio - 1 - log_ratio, mask),
        "rollout_corr/reverse_kl": masked_mean(ratio * log_ratio, mask),  # KL(old || rollout), by importance weight
        "rollout_corr/training_ppl": log_ppl_old.exp().mean() if rows.any() else torch.ones(()),
        "rollout_corr/rollout_ppl": log_ppl_rollout.exp().mean() if rows.any() else torch.ones(()),
        "rollout_corr/training_log_ppl": log_ppl_old.mean() if rows.any() else torch.zeros(()),
        "rollout_corr/rollout_log_ppl": log_ppl_rollout.mean() if rows.any() else torch.zeros(()),  # ~ entropy
        "rollout_corr/ppl_ratio": (log_ppl_old - log_ppl_rollout).exp().mean() if rows.any() else torch.ones(()),
        "rollout_corr/chi2_token": masked_mean(ratio.square(), mask) - 1,
        "rollout_corr/chi2_seq": (sequence.square().mean() - 1) if rows.any() else torch.zeros(()),
        "rollout_corr/eff_sample_size": _effective_sample_size(weights),
    }
    return {name: float(value) for name, value in values.items()}


def _weight_metrics(weights: Tensor, log_ratio: Tensor, mask: Tensor, level: str) -> dict[str, float]:
    """The weights of the tokens that train, as verl's: bounded, and not yet divided by their mean.

    For sequences the smallest and the largest are those of `log_ratio` before they are bounded (up to e^20).
    """
    chosen = weights[mask]
    if not len(chosen):
        return {}
    sums = log_ratio.sum(-1)[mask.any(-1)]
    extremes = chosen if level == "token" else sums.clamp_max(MAX_LOG_RATIO).exp()
    return {
        "rollout_corr/rollout_is_mean": float(chosen.mean()),
        "rollout_corr/rollout_is_std": float(chosen.std(correction=0)),
        "rollout_corr/rollout_is_min": float(extremes.min()),
        "rollout_corr/rollout_is_max": float(extremes.max()),
        "rollout_corr/rollout_is_eff_sample_size": float(_effective_sample_size(chosen)),
    }


def _effective_sample_size(weights: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2): 1 where all weights are equal."""
    if not len(weights):
        return torch.ones(())
    return weights.sum().square() / (len(weights) * weights.square().sum()).clamp_min(1e-30)


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
