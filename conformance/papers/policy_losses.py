"""Policy losses of one response: (row, options) -> the loss of each of its trained tokens.

`Row.new` is what the gradient is taken of; `Row.frozen` is the same numbers where a paper writes sg(.) or treats a
factor as a constant, so that finite differences of `new` alone give the gradient which the paper means.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from conformance.papers import Rows, Undecided, below, clip, mean

Options = Mapping[str, Any]
Loss = Callable[["Row", Options], list[float]]


@dataclass(frozen=True)
class Row:
    """The trained tokens of one response; log-probs in nats."""

    new: list[float]
    frozen: list[float]
    old: list[float]
    advantages: list[float]
    weights: list[float]
    selected: list[bool]

    @property
    def ratios(self) -> list[float]:
        return [math.exp(n - o) for n, o in zip(self.new, self.old, strict=True)]

    @property
    def frozen_ratios(self) -> list[float]:
        return [math.exp(f - o) for f, o in zip(self.frozen, self.old, strict=True)]


def bounds(options: Options) -> tuple[float, float]:
    """The lower and the upper clip range."""
    low, high = options.get("clip_ratio_low"), options.get("clip_ratio_high")
    return options["clip_ratio"] if low is None else low, options["clip_ratio"] if high is None else high


def ppo(ratio: float, advantage: float, options: Options) -> float:
    """PPO (arXiv 1707.06347): -min(ratio A, clip(ratio) A), with DAPO's two ranges (arXiv 2503.14476)."""
    low, high = bounds(options)
    return -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def clips(ratio: float, advantage: float, options: Options) -> bool:
    """Whether PPO's clip decides: what its code and GSPO's paper count as clipped."""
    low, high = bounds(options)
    return (advantage > 0 and below(1 + high, ratio)) or (advantage < 0 and below(ratio, 1 - low))


def weighted(row: Row, losses: list[float]) -> list[float]:
    return [w * loss for w, loss in zip(row.weights, losses, strict=True)]


def value_error(now: float, before: float, target: float, reach: float) -> float:
    """A value's, as PPO's authors have it in their code: the worse of two squared errors, halved."""
    moved = clip(now, before - reach, before + reach)
    plain, clipped = (now - target) ** 2 / 2, (moved - target) ** 2 / 2
    return clipped if moved != now and below(plain, clipped) else plain


def vanilla(row: Row, options: Options) -> list[float]:
    """PPO's clip, and for A < 0 the dual clip (arXiv 1912.09729): the objective is at least c A."""
    losses = []
    for ratio, advantage in zip(row.ratios, row.advantages, strict=True):
        loss = ppo(ratio, advantage, options)
        ceiling = -options["clip_ratio_c"] * advantage
        losses.append(ceiling if advantage < 0 and below(ceiling, loss) else loss)
    return weighted(row, losses)


def gspo(row: Row, options: Options) -> list[float]:
    """GSPO-token (arXiv 2507.18071): the ratio is sg(s) pi_t / sg(pi_t), s = (pi(y) / pi_old(y))^(1/|y|)."""
    s = math.exp(mean([f - o for f, o in zip(row.frozen, row.old, strict=True)]))
    ratios = [s * math.exp(n) / math.exp(f) for n, f in zip(row.new, row.frozen, strict=True)]
    return weighted(row, [ppo(r, a, options) for r, a in zip(ratios, row.advantages, strict=True)])


def geo_mean(row: Row, options: Options) -> list[float]:
    """GMPO (arXiv 2507.20673): -A prod_t(min(ratio A, clip(ratio, e^-low, e^high) A) / A)^(1/|o|), one A a response.

    The weights enter as the product of theirs does, as in verl.
    """
    low, high = bounds(options)
    factors = []
    for ratio, advantage in zip(row.ratios, row.advantages, strict=True):
        clipped = clip(ratio, math.exp(-low), math.exp(high))
        factors.append(min(ratio, clipped) if advantage > 0 else max(ratio, clipped))
    root = 1 / len(factors)
    loss = -mean(row.advantages) * math.prod(factors) ** root * math.prod(row.weights) ** root
    return [loss] * len(factors)


def cispo(row: Row, options: Options) -> list[float]:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -sg(clip(ratio)) A log pi."""
    low, high = bounds(options)
    clipped = [clip(ratio, 1 - low, 1 + high) for ratio in row.frozen_ratios]
    return weighted(row, [-c * a * n for c, a, n in zip(clipped, row.advantages, row.new, strict=True)])


def sapo(row: Row, options: Options) -> list[float]:
    """SAPO (arXiv 2511.20347): -4/tau sigmoid(tau (ratio - 1)) A, tau by the sign of A."""
    losses = []
    for ratio, advantage in zip(row.ratios, row.advantages, strict=True):
        tau = options["tau_pos"] if advantage > 0 else options["tau_neg"]
        losses.append(-4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage)
    return weighted(row, losses)


def gpg(row: Row, options: Options) -> list[float]:
    """GPG (arXiv 2504.02546): -A log pi."""
    return weighted(row, [-a * n for a, n in zip(row.advantages, row.new, strict=True)])


def dro(row: Row, options: Options) -> list[float]:
    """DRO (arXiv 2405.19107), token by token as in verl: -A log pi + beta / 2 (log ratio)^2."""
    tokens = zip(row.advantages, row.new, row.old, strict=True)
    return weighted(row, [-a * n + options["dro_beta"] / 2 * (n - o) ** 2 for a, n, o in tokens])


def dppo(row: Row, options: Options, divergence: Callable[[float, float], float]) -> list[float]:
    """DPPO (arXiv 2602.04879): -A sg(min(ratio, c)) log pi, 0 where A drives a token on that is out of the region."""
    low, high = bounds(options)
    losses = []
    for a, n, f, o in zip(row.advantages, row.new, row.frozen, row.old, strict=True):
        rising = f > o
        leaves = rising == (a > 0) and f != o and below(high if rising else low, divergence(math.exp(o), math.exp(f)))
        ratio = min(math.exp(f - o), options["clip_ratio_c"])
        losses.append(0.0 if leaves else -a * ratio * n)
    return weighted(row, losses)


def dppo_tv(row: Row, options: Options) -> list[float]:
    """DPPO with the total variation of "this token or another"."""
    return dppo(row, options, lambda old, new: (abs(new - old) + abs((1 - new) - (1 - old))) / 2)


def dppo_kl(row: Row, options: Options) -> list[float]:
    """DPPO with KL(old || new) of "this token or another"."""

    def divergence(old: float, new: float) -> float:
        others = (1 - old) / (1 - new)
        return old * math.log(old / new) + (1 - old) * math.log(others) if others > 0 else math.inf

    return dppo(row, options, divergence)


def clip_cov(row: Row, options: Options) -> list[float]:
    """Clip-Cov (arXiv 2505.22617): PPO's clip without the selected tokens."""
    tokens = zip(row.selected, row.ratios, row.advantages, strict=True)
    return weighted(row, [0.0 if selected else ppo(ratio, a, options) for selected, ratio, a in tokens])


def kl_cov(row: Row, options: Options) -> list[float]:
    """KL-Cov (arXiv 2505.22617): -ratio A, and beta |log ratio| on the selected tokens."""
    losses = []
    for selected, n, o, a in zip(row.selected, row.new, row.old, row.advantages, strict=True):
        penalty = options["ppo_kl_coef"] * abs(n - o) if selected else 0.0
        losses.append(-math.exp(n - o) * a + penalty)
    return weighted(row, losses)


def whole_ratio(row: Row) -> float:
    """pi(y) / pi_old(y) of the response."""
    return math.exp(sum(f - o for f, o in zip(row.frozen, row.old, strict=True)))


def topr(row: Row, options: Options) -> list[float]:
    """TOPR (arXiv 2503.14286): log pi of a good response, [pi/mu]_0^1 log pi of a bad one, by the response's ratio."""
    cut = min(whole_ratio(row), 1.0)
    return weighted(row, [-(cut if a < 0 else 1.0) * a * n for a, n in zip(row.advantages, row.new, strict=True)])


def vespo(row: Row, options: Options) -> list[float]:
    """VESPO (arXiv 2602.10693): -phi(W) A log pi, phi(W) = W^k e^(lambda (1 - W)), W of the response, phi frozen."""
    ratio, losses = whole_ratio(row), []
    for a, n in zip(row.advantages, row.new, strict=True):
        side = "pos" if a >= 0 else "neg"
        k, decay = options[f"vespo_k_{side}"], options[f"vespo_lambda_{side}"]
        losses.append(-(ratio**k) * math.exp(decay * (1 - ratio)) * a * n)
    return weighted(row, losses)


NAMED = (vanilla, gspo, geo_mean, cispo, sapo, gpg, dro, dppo_tv, dppo_kl, clip_cov, kl_cov, topr, vespo)
LOSSES: dict[str, Loss] = {loss.__name__: loss for loss in NAMED}


def covariances(log_probs: Rows, advantages: Rows, masks: Rows) -> dict[tuple[int, int], float]:
    """Clip-Cov and KL-Cov: (log pi - mean) (A - mean) of each trained token, by its row and place."""
    places = [(i, t) for i, mask in enumerate(masks) for t, counts in enumerate(mask) if counts]
    log_prob = mean([log_probs[i][t] for i, t in places])
    advantage = mean([advantages[i][t] for i, t in places])
    return {(i, t): (log_probs[i][t] - log_prob) * (advantages[i][t] - advantage) for i, t in places}


def share(tokens: int, ratio: float) -> int:
    """How many tokens that is: at least one."""
    return max(1, math.floor(tokens * ratio))


def highest(covariance: dict[tuple[int, int], float], ratio: float) -> set[tuple[int, int]]:
    """KL-Cov's selection: the share `ratio` of the tokens with the highest covariance."""
    ranked = sorted(covariance, key=lambda place: covariance[place], reverse=True)
    count = share(len(ranked), ratio)
    if count < len(ranked) and not below(covariance[ranked[count]], covariance[ranked[count - 1]]):
        raise Undecided("two tokens have one covariance")
    return set(ranked[:count])


def between(covariance: dict[tuple[int, int], float], low: float, high: float) -> set[tuple[int, int]]:
    """The tokens among which Clip-Cov draws."""
    return {place for place, value in covariance.items() if below(low, value) and below(value, high)}
