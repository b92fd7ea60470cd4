"""Rollout correction: importance weights and rejection from lambda_t = log pi_old - log pi_rollout of each token."""

import math
from collections.abc import Callable

from conformance.papers import Rows, below, masked, mean


def weight(log_ratio: float, lower: float | None, upper: float) -> float:
    """TIS (Yao et al. 2025): the ratio, at most C; IcePop (arXiv 2510.18855): 0 outside a band."""
    ratio = math.exp(log_ratio)
    if lower is None:
        return min(ratio, upper)
    return ratio if below(lower, ratio) and below(ratio, upper) else 0.0


def importance_weights(lambdas: Rows, masks: Rows, level: str, lower: float | None, upper: float) -> Rows:
    """The weight of each trained token, row by row; of those alone. A sequence's is that of the sum on each token."""
    rows = [masked(row, mask) for row, mask in zip(lambdas, masks, strict=True)]
    if level == "sequence":
        rows = [[sum(row)] * len(row) for row in rows]
    return [[weight(value, lower, upper) for value in row] for row in rows]


def normalised(weights: Rows, level: str) -> Rows:
    """Divided by the mean over the batch's tokens, or over its responses."""
    units = [weight for row in weights for weight in (row if level == "token" else row[:1])]
    return [[weight / max(mean(units), 1e-8) for weight in row] for row in weights]


DIVERGENCES = {
    "k1": lambda value: -value,  # log pi_rollout - log pi_old
    "k2": lambda value: value**2 / 2,
    "k3": lambda value: math.exp(value) - 1 - value,
}
SCOPES: dict[str, Callable[[list[float]], float]] = {"seq_sum": sum, "seq_mean": mean, "seq_max": max}


def stays(divergence: float, k: str, lower: float | None, upper: float) -> bool:
    """k1 is bounded by ratios, on both sides; k2 and k3 from above."""
    if k == "k1":
        return below(math.log(1 / upper if lower is None else lower), divergence) and below(divergence, math.log(upper))
    return below(divergence, upper)


def bernoulli_kl(log_p: float, log_q: float) -> float:
    """Kullback and Leibler 1951, of two events: this token, or another one."""
    p, q = math.exp(log_p), math.exp(log_q)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def kpop_kept(old: list[float], rollout: list[float], upper: float) -> list[bool]:
    """KPop (Guo et al. 2026): both KLs of a token are at most phi."""
    pairs = list(zip(old, rollout, strict=True))
    return [below(bernoulli_kl(p, q), upper) and below(bernoulli_kl(q, p), upper) for p, q in pairs]


def m2po_kept(lambdas: list[float], advantages: list[float], threshold: float) -> list[bool]:
    """M2PO (arXiv 2510.01161), algorithm 1, over all trained tokens of a batch: the farthest goes until it holds.

    As long as the mean of those left that PPO's clip could hold is above the bound; equal ones go together.
    """
    moments = [v * v if a * v > 0 else None for v, a in zip(lambdas, advantages, strict=True)]
    while inside := [m for m in moments if m is not None and m >= 0]:
        if below(mean(inside), threshold):
            break
        moments = [-1.0 if m == max(inside) else m for m in moments]
    return [m is None or m >= 0 for m in moments]


def opsm_kept(rollout: list[float], new: list[float], advantages: list[float], delta: float) -> list[bool]:
    """DeepSeek-V3.2 (arXiv 2512.02556), a response: 0 where A < 0 and the mean of log(pi_old / pi) is above delta."""
    distance = mean([q - p for q, p in zip(rollout, new, strict=True)])
    return [not (a < 0 and not below(distance, delta)) for a in advantages]


def kept(lambdas: list[float], name: str, lower: float | None, upper: float) -> list[bool]:
    """Which of a response's trained tokens stay, by verl's names: SCOPE_k1|k2|k3."""
    scope, k = name.rsplit("_", 1)
    divergences = [DIVERGENCES[k](value) for value in lambdas]
    if scope == "token":
        return [stays(value, k, lower, upper) for value in divergences]
    return [bool(lambdas) and stays(SCOPES[scope](divergences), k, lower, upper)] * len(lambdas)
