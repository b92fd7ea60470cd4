"""Statistics of n responses to each validation prompt: mean@n, best@k, worst@k and maj@n.

verl estimates best@k, worst@k and maj@k by a bootstrap (1,000 draws of k responses with replacement). Here best@k and
worst@k are the exact expectation over draws without replacement, and maj@n is the vote of all n responses: the same
numbers every time, and no draw can hold one response twice. So best@n is the plain maximum, and for scores of 0 and 1
best@k is the unbiased pass@k of Chen et al. (arXiv 2107.03374), 1 - C(n-c, k) / C(n, k) with c right responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt

import numpy as np


def subset_sizes(n: int) -> list[int]:
    """The k of best@k for n responses: the powers of two from 2 up to n, and n itself; none for n = 1."""
    powers = [2**i for i in range(1, n.bit_length()) if 2**i < n]
    return [*powers, n] if n > 1 else []


def best_at_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Expected best score, (P,) float64, among k of n responses to each of P prompts, drawn without replacement.

    The i-th smallest of the (P, n) scores is the best of a draw with probability C(i-1, k-1) / C(n, k).
    """
    n = scores.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: must be from 1 to n={n}")
    weights = np.array([comb(i - 1, k - 1) / comb(n, k) for i in range(1, n + 1)])
    return np.sort(scores.astype(np.float64), axis=-1) @ weights


def worst_at_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Expected worst score among k of the n responses; see `best_at_k`."""
    return -best_at_k(-scores, k)


def majority_score(scores: np.ndarray, answers: np.ndarray) -> float:
    """Score of the answer that most responses to a prompt give (self-consistency, arXiv 2203.11171).

    Of answers that are equally common the first one given wins, as with verl. An answer's score is that of the first
    response that gives it. Responses without an answer do not vote (verl lets them, as one more answer); if there are
    no others, the first response's score stands.

    Args:
        scores: (n,) scores.
        answers: (n,) numbers: equal for equal answers, nan for none.
    """
    voting = np.flatnonzero(~np.isnan(answers))
    if not len(voting):
        return float(scores[0])
    given = answers[voting]
    votes = (given[:, None] == given).sum(-1)
    return float(scores[voting[votes.argmax()]])


def majority_at_n(scores: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """`majority_score` of each prompt: scores and answers (P, n) -> (P,) float64."""
    return np.array([majority_score(*prompt) for prompt in zip(scores, answers, strict=True)], np.float64)


def pred_ids(preds: Sequence[str | None]) -> np.ndarray:
    """Number the answers, since labels hold numbers only: (N,) float32, equal for equal answers, nan for none."""
    numbers = {pred: i for i, pred in enumerate(dict.fromkeys(preds))}
    return np.array([np.nan if pred is None else numbers[pred] for pred in preds], np.float32)


def statistics(scores: np.ndarray, answers: np.ndarray | None) -> dict[str, np.ndarray]:
    """Statistics by name, each a number for each prompt: mean@n and, for n > 1, std@n, best@k, worst@k and maj@n.

    Args:
        scores: (P, n) scores of n responses to each of P prompts.
        answers: (P * n,) numbers: equal for equal answers, nan for none; None, or none at all: without maj@n.

    Returns:
        (P,) each; of mean@n the scores themselves, (P, n), whose mean is the same and is not rounded twice.
    """
    n = scores.shape[-1]
    found = {f"mean@{n}": scores}
    if n > 1:
        found[f"std@{n}"] = scores.std(-1)
    for k in subset_sizes(n):
        found[f"best@{k}"], found[f"worst@{k}"] = best_at_k(scores, k), worst_at_k(scores, k)
    if n > 1 and answers is not None and not np.isnan(answers).all():
        found[f"maj@{n}"] = majority_at_n(scores, answers.reshape(-1, n))
    return found


def judged(scores: np.ndarray, failed: np.ndarray, acc: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return what validation reports of responses, by name: `reward`, and `acc` if the reward function says it of all.

    Args:
        scores: (N,); nan where the function failed, which counts as the worst of the others.
        failed: (N,) bool: where the function failed. Such a response counts as wrong.
        acc: (N,), nan where it was not returned; None: nowhere.

    Returns:
        (N,) numbers each; no `reward` where no response has a score.
    """
    values = {}
    if not np.isnan(scores).all():
        values["reward"] = np.where(np.isnan(scores), np.nanmin(scores), scores)
    if acc is not None and not np.isnan(acc[~failed]).any():
        values["acc"] = np.where(failed, 0.0, acc)
    return values


def interval(values: np.ndarray, z: float = 1.959964) -> tuple[float, float]:
    """The confidence interval of a mean of (P,) values, one for each prompt, with z standard errors: 95 % by default.

    The prompts were drawn from many more. Of zeros and ones it is Wilson's score interval, which holds for few prompts
    and for shares near 0 and 1, too; of other values `normal_interval`.
    """
    if not np.isin(values, (0.0, 1.0)).all():
        return normal_interval(values, z)
    count, mean = len(values), float(np.mean(values))
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * sqrt(mean * (1 - mean) / count + (z / (2 * count)) ** 2)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def normal_interval(values: np.ndarray, z: float = 1.959964) -> tuple[float, float]:
    """The mean of (P,) values with z standard errors on both sides, also for differences between two models.

    There is one value for each prompt; of a single one the interval is infinite. Several responses to a prompt are
    averaged before, since they are not independent (Miller, arXiv 2411.00640).
    """
    count, mean = len(values), float(np.mean(values))
    half = z * float(np.std(values, ddof=1)) / sqrt(count) if count > 1 else float("inf")
    return mean - half, mean + half
