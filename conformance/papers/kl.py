"""KL(p || q) from the log-probs of one sampled token, and over a vocabulary."""

import math
from collections.abc import Callable

from conformance.papers import clip

Estimator = Callable[[float, float], float]


def k1(log_p: float, log_q: float) -> float:
    """Schulman 2020, "Approximating KL Divergence": -log r with r = q / p."""
    return -(log_q - log_p)


def absolute(log_p: float, log_q: float) -> float:
    """The distance of the log-probs."""
    return abs(log_p - log_q)


def k2(log_p: float, log_q: float) -> float:
    """Schulman 2020: (log r)^2 / 2."""
    return (log_q - log_p) ** 2 / 2


def k3(log_p: float, log_q: float) -> float:
    """Schulman 2020: (r - 1) - log r; as verl bounds it, r to e^+-20 and the value to +-10."""
    r = math.exp(clip(log_q - log_p, -20.0, 20.0))
    return clip((r - 1) - math.log(r), -10.0, 10.0)


def unbiased_k3(log_p: float, log_q: float, log_old: float) -> float:
    """DeepSeek-V3.2 (arXiv 2512.02556): k3 times p / p_old. Its gradient is that of both factors."""
    return math.exp(log_p - log_old) * (math.exp(log_q - log_p) - (log_q - log_p) - 1)


def full(logits: list[float], ref_logits: list[float]) -> float:
    """Kullback and Leibler 1951: the sum over the vocabulary of p log(p / q)."""
    p, q = softmax(logits), softmax(ref_logits)
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def softmax(logits: list[float]) -> list[float]:
    """The probabilities of a vocabulary."""
    exponentials = [math.exp(logit) for logit in logits]
    return [e / sum(exponentials) for e in exponentials]


# (value, what the gradient is that of)
PLAIN: dict[str, tuple[Estimator, Estimator]] = {
    **dict.fromkeys(("k1", "kl"), (k1, k1)),
    "abs": (absolute, absolute),
    **dict.fromkeys(("k2", "mse"), (k2, k2)),
    **dict.fromkeys(("k3", "low_var_kl"), (k3, k3)),
}
# NAME+: the gradient of k2, straight through.
ESTIMATORS = PLAIN | {f"{name}+": (value, k2) for name, (value, _) in PLAIN.items()}
