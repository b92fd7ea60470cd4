"""Cases of the policy losses: value, gradient with respect to the log-probs, clip fraction. See `ENTRIES`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.entries import Probe, probed
from conformance.form import GRADIENT_DIGITS, Case, Group, rounded, whole
from conformance.gradients import slope
from conformance.papers import Rows, masked, mean
from conformance.papers.aggregates import AGGREGATES
from conformance.papers.policy_losses import LOSSES, Row, between, clips, covariances, highest

Place = tuple[int, int]


@dataclass(frozen=True)
class Scenario:
    """A batch, and what it probes. Off the mask stand numbers that a loss must not read."""

    probes: str
    old: Rows
    change: Rows
    advantages: Rows
    masks: Rows
    weights: Rows | None = None
    convention: str = ""

    @property
    def new(self) -> Rows:
        return [
            [round(o + c, 6) for o, c in zip(*rows, strict=True)] for rows in zip(self.old, self.change, strict=True)
        ]

    def columns(self) -> dict[str, Any]:
        """What an implementation is given."""
        columns = {"log_probs": self.new, "old_log_probs": self.old, "advantages": self.advantages}
        weights = {} if self.weights is None else {"rollout_is_weights": self.weights}
        return {**columns, **weights, "response_mask": whole(self.masks)}

    def rows(self, selected: set[Place]) -> list[Row]:
        """The trained tokens of each response that has one."""
        result = []
        weights = self.weights or [[1.0] * len(row) for row in self.masks]
        for i, mask in enumerate(self.masks):
            new, old, advantages, weight = (
                masked(column[i], mask) for column in (self.new, self.old, self.advantages, weights)
            )
            chosen = [(i, t) in selected for t, counts in enumerate(mask) if counts]
            if new:
                result.append(Row(new, new, old, advantages, weight, chosen))
        return result


def spread(advantages: list[float], columns: int = 4) -> Rows:
    """One advantage a response."""
    return [[value] * columns for value in advantages]


OLD = [[-1.2, -0.4, -2.1, -0.7], [-0.9, -1.6, -6.0, -0.1], [-0.3, -2.4, -1.1, -5.0], [-1.8, -0.6, -0.5, -1.3]]
CHANGE = [[0.31, -0.12, 0.05, -0.46], [-0.35, 0.14, 4.5, -2.9], [0.08, 0.52, -0.27, 3.1], [0.11, 0.29, -0.33, -0.07]]
PREFIXES = [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
HOLES = [[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0]]
OLD_LARGE = [[-10.2, -0.4, -2.1, -0.7], [-0.9, -12.0, -6.0, -0.1], [-0.3, -2.4, -9.6, -5.0], [-1.8, -0.6, -0.5, -1.3]]
LARGE = [[9.0, -11.0, 0.35, -0.6], [-9.5, 11.5, 4.5, -2.9], [-0.27, 0.31, 8.5, 3.1], [0.1, 0.21, -8.0, -0.05]]
PLAIN = Scenario(
    "responses of different lengths, advantages of both signs, ratios within and beyond the clip range",
    OLD,
    CHANGE,
    spread([1.1, -0.7, -1.6, 0.9]),
    PREFIXES,
)
SCENARIOS = {
    "lengths": PLAIN,
    "holes": replace(PLAIN, probes="masks with holes (a tool's words)", masks=HOLES),
    "empty_row": replace(
        PLAIN,
        probes="a response of which no token trains",
        masks=[*PREFIXES[:2], [0.0] * 4, PREFIXES[3]],
        convention="a response without a token is none: it does not count in means over responses",
    ),
    "all_negative": replace(PLAIN, probes="negative advantages only", advantages=spread([-1.1, -0.7, -1.6, -0.9])),
    "no_signal": replace(
        PLAIN, probes="advantages of 0, as of a group of equal scores", advantages=spread([0.0, 0.0, -1.6, 0.9])
    ),
    "large": replace(
        PLAIN, probes="log-ratios of up to 11.5, of both signs and under both signs", old=OLD_LARGE, change=LARGE
    ),
    "on_policy": replace(
        PLAIN, probes="log-probs equal to the old ones: the gradient is that of the policy", change=[[0.0] * 4] * 4
    ),
    "token_advantages": replace(
        PLAIN,
        probes="an advantage of its own for each token",
        advantages=[[1.1, -0.4, 0.6, -0.9], [-0.7, 0.8, 3.0, 3.0], [-1.6, 0.5, 0.7, 3.0], [0.9, -0.3, -1.2, 0.2]],
    ),
    "weights": replace(
        PLAIN,
        probes="importance weights of tokens against the sampler",
        weights=[[0.5, 1.25, 0.75, 2.0], [1.5, 0.25, 7.0, 7.0], [1.0, 0.75, 1.75, 7.0], [2.0, 0.5, 1.0, 0.9]],
    ),
}


@dataclass(frozen=True)
class Entry:
    """How a loss is probed.

    Attributes:
        arxiv: of its paper.
        equation: in plain text.
        mode: how it aggregates, by verl's names.
        settings: of every case, by verl's names.
        scenarios: which of `SCENARIOS`.
        also: more cases: (name, scenario, settings, what it probes).
        convention: of every case.
        conventions: of cases, by their names.
    """

    arxiv: str
    equation: str
    mode: str = "token-mean"
    settings: Mapping[str, Any] = field(default_factory=dict)
    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    also: tuple[Probe, ...] = ()
    convention: str = ""
    conventions: Mapping[str, str] = field(default_factory=dict)


CLIP: Mapping[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
ONE_ADVANTAGE = tuple(name for name in SCENARIOS if name != "token_advantages")

ENTRIES: dict[str, Entry] = {
    "vanilla": Entry(
        "2402.03300",
        "-min(rho A, clip(rho, 1 - low, 1 + high) A) (eq. 3; the ranges of DAPO, 2503.14476 eq. 8), for A < 0 at most "
        "-c A (dual clip, 1912.09729)",
        settings={**CLIP, "clip_ratio_c": 3.0},
        also=(
            ("as_published", "lengths", {"loss_agg_mode": "seq-mean-token-mean"}, "GRPO's mean over responses"),
            ("one_range", "lengths", {"clip_ratio_high": 0.2}, "one clip range, as in PPO"),
        ),
    ),
    "gspo": Entry(
        "2507.18071",
        "-min(s A, clip(s, 1 - low, 1 + high) A) (eq. 5), s = (pi(y) / pi_old(y))^(1/|y|) (eq. 7); with token "
        "advantages its token variant (eq. 13)",
        "seq-mean-token-mean",
        {"clip_ratio_low": 0.04, "clip_ratio_high": 0.06},
        conventions={"weights": "the paper has no weights of tokens; here they multiply its token variant"},
    ),
    "geo_mean": Entry(
        "2507.20673",
        "-A prod_t(clipped rho_t)^(1/|o|), log rho clipped to [-low, high] on the side of A's sign",
        "seq-mean-token-mean",
        {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4},
        ONE_ADVANTAGE,
    ),
    "cispo": Entry(
        "2506.13585",
        "-sg(clip(rho, 1 - low, 1 + high)) A log pi (eq. 4 and 5)",
        settings={"clip_ratio_low": 10.0, "clip_ratio_high": 0.28},
        also=(("lower_bound", "lengths", CLIP, "a lower bound too (the paper's runs have none)"),),
    ),
    "sapo": Entry(
        "2511.20347",
        "-4/tau sigmoid(tau (rho - 1)) A, tau by the sign of A",
        "seq-mean-token-mean",
        {"tau_pos": 1.0, "tau_neg": 1.05},
    ),
    "gpg": Entry("2504.02546", "-A log pi", scenarios=("lengths", "holes", "empty_row", "token_advantages", "weights")),
    "dro": Entry(
        "2405.19107",
        "-A log pi + beta/2 (log pi - log pi_old)^2, of tokens",
        settings={"dro_beta": 0.5},
        convention="the paper's is of whole responses and offline; of tokens as in verl",
    ),
    "dppo_tv": Entry(
        "2602.04879",
        "-M A sg(min(rho, c)) log pi, M = 0 where A drives a token on whose |pi - pi_old| is above delta",
        settings={"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 20.0},
    ),
    "dppo_kl": Entry(
        "2602.04879",
        "-M A sg(min(rho, c)) log pi, M = 0 where A drives a token on whose KL(pi_old, pi) of this token or not is "
        "above delta",
        settings={"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0},
    ),
    "clip_cov": Entry(
        "2505.22617",
        "-min(rho A, clip(rho) A), 0 on tokens with (log pi - mean)(A - mean) between two bounds; all of them, so that "
        "no chance decides",
        settings={**CLIP, "clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 5.0},
        scenarios=("lengths", "holes", "empty_row", "token_advantages", "weights"),
    ),
    "kl_cov": Entry(
        "2505.22617",
        "-rho A, and beta |log rho| on the share of tokens with the highest (log pi - mean)(A - mean)",
        settings={"kl_cov_ratio": 0.25, "ppo_kl_coef": 1.0},
        scenarios=("lengths", "holes", "empty_row", "token_advantages", "weights"),
    ),
    "topr": Entry(
        "2503.14286",
        "-A log pi where A >= 0, -sg(min(pi(y) / pi_old(y), 1)) A log pi where A < 0",
        "seq-mean-token-sum",
    ),
    "vespo": Entry(
        "2602.10693",
        "-sg(W^k exp(lambda (1 - W))) A log pi, W = pi(y) / pi_old(y), k and lambda by the sign of A",
        settings={"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
        conventions={"weights": "the paper's W is against the sampler itself; here weights multiply the loss"},
    ),
}


def selection(name: str, of: Scenario, settings: Mapping[str, Any]) -> set[Place]:
    """The tokens that Clip-Cov and KL-Cov treat apart."""
    if name == "clip_cov":
        bounds = settings["clip_cov_lb"], settings["clip_cov_ub"]
        return between(covariances(of.new, of.advantages, of.masks), *bounds)
    if name == "kl_cov":
        return highest(covariances(of.new, of.advantages, of.masks), settings["kl_cov_ratio"])
    return set()


def clip_fraction(name: str, rows: list[Row], settings: Mapping[str, Any]) -> float | None:
    """The share of tokens whose ratio is clipped, where paper or code of the authors have it."""
    if name == "vanilla":
        ratios = [row.ratios for row in rows]
    elif name == "gspo":
        ratios = [
            [math.exp(mean([n - o for n, o in zip(row.new, row.old, strict=True)]))] * len(row.new) for row in rows
        ]
    else:
        return None
    pairs = [pair for row, own in zip(rows, ratios, strict=True) for pair in zip(own, row.advantages, strict=True)]
    return mean([float(clips(ratio, advantage, settings)) for ratio, advantage in pairs])


def expected(name: str, of: Scenario, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Loss, gradient and clip fraction by the paper's formula."""
    loss, aggregate = LOSSES[name], AGGREGATES[settings["loss_agg_mode"]]
    rows = of.rows(selection(name, of, settings))
    losses = [loss(row, settings) for row in rows]
    trained = [[1.0] * len(row) for row in losses]

    def moved(i: int, t: int, value: float) -> float:
        new = [*rows[i].new[:t], value, *rows[i].new[t + 1 :]]
        return aggregate([*losses[:i], loss(replace(rows[i], new=new), settings), *losses[i + 1 :]], trained, 1.0)

    def at(i: int, t: int) -> float:
        return slope(lambda x: moved(i, t, x), rows[i].new[t])

    slopes = iter([at(i, t) for i, row in enumerate(rows) for t in range(len(row.new))])
    gradient = [[next(slopes) if counts else 0.0 for counts in mask] for mask in of.masks]
    outputs = {"loss": rounded(aggregate(losses, trained, 1.0)), "gradient": rounded(gradient, GRADIENT_DIGITS)}
    fraction = clip_fraction(name, rows, settings)
    return outputs if fraction is None else {**outputs, "clip_fraction": rounded(fraction)}


def groups() -> list[Group]:
    """All groups of cases of this kind."""
    result = []
    for name, entry in ENTRIES.items():
        cases = []
        for title, scenario, more, probes in probed(entry, SCENARIOS):
            settings = {"loss_agg_mode": entry.mode, **entry.settings, **more}
            means = "seq" in settings["loss_agg_mode"]  # of a mean over tokens an empty response is no part anyway
            convention = "; ".join(
                filter(None, (scenario.convention if means else "", entry.convention, entry.conventions.get(title)))
            )
            outputs = expected(name, scenario, settings)
            cases.append(Case(title, probes, settings, scenario.columns(), outputs, convention))
        result.append(Group("policy_loss", name, entry.arxiv, entry.equation, cases))
    return result
