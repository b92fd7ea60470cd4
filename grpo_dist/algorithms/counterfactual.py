"""How alike two configs push on the same responses, and what of it is chance.

Every statistic follows from sums over units: groups of responses, or mini-batches. So it is the same function of one
step, of all, and of a draw of the bootstrap, which draws as many units with replacement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

DRAWS, SEED = 1000, 0
LEAST_UNITS = 8  # of fewer the bootstrap's interval is much too short
CLEAR, SAME = 0.2, 0.5  # least correlation of pushes that are clearly alike, and of those that go the same way
ROUNDING = 1e-12  # of a variance, relative to the mean square


def group_sums(pushes: Sequence[np.ndarray], trains: np.ndarray, rows: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """What `advantage_statistics` takes, of each of G groups: (14, G).

    Args:
        pushes: of both configs, (tokens,) each: the token's advantage times its weight; 0 where it does not train.
        trains: (tokens,) bool, whether the token trains by one of them.
        rows: (tokens,) its response, from 0 to N-1.
        groups: (N,) the response's group, from 0 to G-1.
    """
    x, y = (push.astype(np.float64) for push in pushes)
    of_tokens = [np.bincount(rows, values, len(groups)) for values in (trains, x, y, x * x, y * y, x * y)]
    a, b = (values / of_tokens[0].clip(1) for values in of_tokens[1:3])  # a response's push is its tokens' mean
    of_rows = (*of_tokens, np.ones(len(groups)), a * b < 0, abs(a), abs(b), a * a, b * b)
    sums = np.stack([np.bincount(groups, values) for values in of_rows])
    return np.concatenate([sums, sums[-2:] > 0])


def advantage_statistics(sums: np.ndarray) -> dict[str, np.ndarray]:
    """Groups that push; Pearson's correlation over tokens that train; of responses the share that changes sign, and
    Kish's effective sample size, (sum |A|)^2 / sum A^2 ("Survey Sampling", 1965).
    """
    n, x, y, xx, yy, xy, responses, turned, size_a, size_b, aa, bb, groups_a, groups_b = sums
    spreads = (n * square - s * s for s, square in ((x, xx), (y, yy)))
    u, v = (
        np.where(spread > ROUNDING * n * square, spread, np.nan)
        for spread, square in zip(spreads, (xx, yy), strict=True)
    )
    statistics = {"correlation": (n * xy - x * y) / np.sqrt(u * v), "sign_changes": turned / responses}
    statistics |= {"effective_size": size_a**2 / aa, "other_effective_size": size_b**2 / bb}
    return {"groups": groups_a, "other_groups": groups_b} | statistics


def products(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[float]:
    """What `gradient_statistics` takes of two gradients, given in parts of any shape: a·b, a·a and b·b."""
    pairs = ((a, b), (a, a), (b, b))
    return [sum(float((u.double() * v.double()).sum()) for u, v in zip(*pair, strict=True)) for pair in pairs]


def gradient_statistics(sums: np.ndarray) -> dict[str, np.ndarray]:
    """Return the cosine."""
    return {"cosine": sums[0] / np.sqrt(sums[1] * sums[2])}


STATISTICS = {"groups": advantage_statistics, "mini-batches": gradient_statistics}


def with_intervals(unit: str, sums: np.ndarray) -> dict[str, list[float]]:
    """Each statistic of a unit's (.., units) sums, with the ends of its 95 % interval: nan where a draw has none."""
    units, statistics = sums.shape[1], STATISTICS[unit]
    counts = np.random.default_rng(SEED).multinomial(units, np.full(units, 1 / units), DRAWS)
    with np.errstate(all="ignore"):
        values, drawn = statistics(sums.sum(1)), statistics(sums @ counts.T)
    ends = {name: np.quantile(draws, (0.025, 0.975)) * (1 if units > 1 else np.nan) for name, draws in drawn.items()}
    return {name: [float(value), *ends[name].tolist()] for name, value in values.items()}


def verdict(sums: Mapping[str, np.ndarray], statistics: Mapping[str, Sequence[float]], *, by_gradient: bool) -> str:
    """Say which way the other config would have pushed, by the sums of each unit and their statistics.

    Where the loss is another one advantages do not tell, but the gradient does (`by_gradient`).
    """
    name, unit = ("cosine", "mini-batches") if by_gradient else ("correlation", "groups")
    why = f"there is no {name} ({'trainer.save_freq keeps weights' if by_gradient else 'see above'})"
    if unit in sums:
        least, (_, low, high) = int((sums[unit][-2:] > 0).sum(1).min()), statistics[name]
        why = f"the {name} may be anything from {low:.2f} to {high:.2f}"
        if least < LEAST_UNITS:
            why = f"one of both configs pushes {least} {unit}, and {LEAST_UNITS} are needed"
        elif low > 0 or high < CLEAR:
            direction = "the same way" if low >= SAME else "partly the same way" if low > 0 else "another way"
            return f"the other config would have pushed {direction} ({name})"
    return f"these data cannot tell what the other config would have pushed: {why}"
