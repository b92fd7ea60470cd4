"""Cases of the corrections between sampler and trainer: importance weights, rejections and masks. See `ENTRIES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conformance.form import Case, Group, rounded, whole
from conformance.papers import Rows, masked
from conformance.papers.corrections import importance_weights, kept, kpop_kept, m2po_kept, normalised, opsm_kept

MASKS = [[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
ROLLOUT = [[-1.2, -0.4, -2.1, -0.7], [-0.9, -1.6, -3.0, -0.1], [-0.3, -2.4, -1.1, -5.0], [-2.8, -3.6, -0.5, -1.3]]
# Trainer less sampler; off the mask it is large.
NEAR = [[0.11, -0.06, 0.35, -0.02], [-0.45, 9.0, -0.13, -7.0], [8.0, 8.0, -8.0, 1.0], [0.03, 0.28, -0.15, 6.0]]
FAR = [[-1.9, 0.3, 0.9, 0.6], [-4.5, 1.5, 2.7, -7.0], [0.2, 2.0, -8.0, 1.0], [2.4, 3.1, -3.2, 1.1]]
PROBES = {
    "near": ("small log-ratios; a mask with holes, an empty row, large log-ratios off the mask", NEAR),
    "far": ("log-ratios of up to 4.5, of both signs", FAR),
}
ADVANTAGES = [[1.0, -0.5, 1.0, -0.5], [-1.0, 2.0, -1.0, 2.0], [3.0] * 4, [-0.7, -0.7, 0.4, 2.0]]

Rule = Callable[[Rows, dict[str, Any]], dict[str, Any]]


def trainer(change: Rows) -> Rows:
    """The log-probs of the trainer."""
    return [[round(r + c, 6) for r, c in zip(*rows, strict=True)] for rows in zip(ROLLOUT, change, strict=True)]


def placed(rows: list[list], off: float) -> Rows:
    """Numbers of trained tokens at their places, `off` elsewhere."""
    found = [iter(row) for row in rows]
    return [[float(next(row)) if m else off for m in mask] for row, mask in zip(found, MASKS, strict=True)]


def trained(*columns: Rows) -> list[list[list[float]]]:
    """Of each response the numbers of its trained tokens, column by column."""
    return [[masked(row, mask) for row in rows] for *rows, mask in zip(*columns, MASKS, strict=True)]


def bounds(threshold: str) -> tuple[float | None, float]:
    """(lower or None, upper) of verl's text."""
    *lower, upper = (float(part) for part in threshold.split("_"))
    return (lower[0] if lower else None), upper


def weights(change: Rows, settings: dict[str, Any]) -> dict[str, Any]:
    """Importance weights; the mask stays."""
    level = settings["rollout_is"]
    found = importance_weights(change, MASKS, level, *bounds(settings["rollout_is_threshold"]))
    if settings.get("rollout_is_batch_normalize"):
        found = normalised(found, level)
    return {"weights": rounded(placed(found, 0.0)), "kept": whole(MASKS)}


def rejection(change: Rows, settings: dict[str, Any]) -> dict[str, Any]:
    """The mask that is left by all criteria."""
    names, limits = settings["rollout_rs"].split(","), settings["rollout_rs_threshold"].split(",")
    stays = [[True] * len(masked(row, mask)) for row, mask in zip(change, MASKS, strict=True)]
    for name, limit in zip(names, limits, strict=True):
        lower, upper = bounds(limit)
        for i, (old, rollout, lambdas) in enumerate(trained(trainer(change), ROLLOUT, change)):
            own = kpop_kept(old, rollout, upper) if name == "token_kpop" else kept(lambdas, name, lower, upper)
            stays[i] = [a and b for a, b in zip(stays[i], own, strict=True)]
    return {"kept": whole(placed(stays, 0.0))}


def second_moment(change: Rows, settings: dict[str, Any]) -> dict[str, Any]:
    """M2PO's mask, over all tokens of the batch."""
    rows = trained(change, ADVANTAGES)
    lambdas, advantages = ([value for row in rows for value in row[column]] for column in (0, 1))
    found = iter(m2po_kept(lambdas, advantages, settings["threshold"]))
    return {"weights": placed([[next(found) for _ in row[0]] for row in rows], 0.0)}


def off_policy(change: Rows, settings: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek-V3.2's mask of sequences."""
    rows = trained(ROLLOUT, trainer(change), ADVANTAGES)
    found = [opsm_kept(old, new, own, settings["threshold"]) for old, new, own in rows]
    return {"weights": placed(found, 0.0)}


@dataclass(frozen=True)
class Entry:
    """How a correction is probed.

    Attributes:
        arxiv: of its paper.
        equation: in plain text.
        rule: (trainer less sampler, settings) -> outputs.
        settings: of the cases, by verl's names; each with both of `PROBES`.
        convention: of every case.
    """

    arxiv: str
    equation: str
    rule: Rule
    settings: tuple[dict[str, Any], ...]
    convention: str = ""


def rejected(name: str, threshold: str) -> dict[str, Any]:
    """Settings of a rejection."""
    return {"rollout_rs": name, "rollout_rs_threshold": threshold}


TIS = "Yao et al. 2025, fengyao.notion.site/off-policy-rl"
RATIOS = "Liu and Li et al. 2025, richardli.xyz/rl-collapse"
SCOPES = {
    "token": "each token by its own",
    "seq_sum": "by the sum",
    "seq_mean": "by the mean",
    "seq_max": "by the worst",
}
DIVERGENCES = {
    "k1": ("log mu - log pi within [log lower, log upper]", "0.5_2.0"),
    "k2": ("(log pi - log mu)^2 / 2 <= upper", "0.05"),
    "k3": ("pi/mu - 1 - log(pi/mu) <= upper", "0.05"),
}


def ratios(level: str) -> tuple[dict[str, Any], ...]:
    """Settings of importance weights: truncated, within a band, divided by their mean."""
    cut, band = ({"rollout_is": level, "rollout_is_threshold": bound} for bound in ("2.0", "0.5_5.0"))
    return cut, band, {**cut, "rollout_is_batch_normalize": True}


ENTRIES: dict[str, Entry] = {
    "rollout_is_token": Entry(
        TIS, "w_t = min(pi_t/mu_t, C); 0 outside a band (IcePop, 2510.18855)", weights, ratios("token")
    ),
    "rollout_is_sequence": Entry(
        TIS, "w = min(prod_t pi_t/mu_t, C), on each token; 0 outside a band", weights, ratios("sequence")
    ),
    **{
        f"{scope}_{k}": Entry(
            RATIOS if scope != "seq_max" else "verl, algorithm.rollout_correction",
            f"{text}: {words}",
            rejection,
            (rejected(f"{scope}_{k}", threshold),),
        )
        for scope, words in SCOPES.items()
        for k, (text, threshold) in DIVERGENCES.items()
        if (scope, k) != ("seq_max", "k1")
    },
    "token_kpop": Entry(
        "Guo et al. 2026, ringtech.notion.site/kpop",
        "max(KL(pi, mu), KL(mu, pi)) <= phi, of the events this token or another",
        rejection,
        (rejected("token_kpop", "0.02"), rejected("token_kpop,seq_mean_k2", "0.02,1.5")),
    ),
    "second_moment_mask": Entry(
        "2510.01161",
        "algorithm 1: the tokens of the largest (log pi/mu)^2 among those that A drives on leave, until the mean of "
        "the others is at most tau",
        second_moment,
        ({"threshold": 0.04}, {"threshold": 1.0}),
    ),
    "off_policy_mask": Entry(
        "2512.02556",
        "0 where A < 0 and 1/|o| sum_t log(mu_t/pi_t) > delta (eq. 9)",
        off_policy,
        ({"threshold": 0.1},),
    ),
}
TITLES = ("", "_two", "_normalised")


def groups() -> list[Group]:
    """All groups of cases of this kind."""
    result = []
    for name, entry in ENTRIES.items():
        cases = []
        for number, settings in enumerate(entry.settings):
            for title, (probes, change) in PROBES.items():
                own = "log_probs" if name == "off_policy_mask" else "old_log_probs"
                columns: dict[str, Any] = {own: trainer(change), "rollout_log_probs": ROLLOUT}
                columns |= {"advantages": ADVANTAGES} if name.endswith("_mask") else {}
                outputs = entry.rule(change, settings)
                inputs = {**columns, "response_mask": whole(MASKS)}
                cases.append(Case(title + TITLES[number], probes, settings, inputs, outputs, entry.convention))
        result.append(Group("correction", name, entry.arxiv, entry.equation, cases))
    return result
