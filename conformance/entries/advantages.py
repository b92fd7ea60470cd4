"""Cases of the advantage estimators. A new estimator is one entry in `ENTRIES`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.entries import Probe, probed
from conformance.form import Case, Group, masked, rounded, whole
from conformance.papers.advantages import ESTIMATORS, Batch

NAN = float("nan")
PREFIXES = [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]] * 2
HOLES = [[1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]] * 2
FULL = [[1.0, 1.0, 1.0, 1.0]] * 6


def outcome(scores: list[float], masks: list[list[float]]) -> list[list[float]]:
    """Scores on the last token that trains; of a response without one, on the last of the row."""
    rows = []
    for score, mask in zip(scores, masks, strict=True):
        last = max((t for t, m in enumerate(mask) if m), default=len(mask) - 1)
        rows.append([score if t == last else 0.0 for t in range(len(mask))])
    return rows


def batch(scores: list[float], masks: list[list[float]], index: str) -> Batch:
    """Responses with an outcome score each, and what else an estimator may read; a letter of `index` is a group."""
    n = len(scores)
    return Batch(
        rewards=outcome(scores, masks),
        masks=masks,
        index=list(index),
        values=[[round(0.3 - 0.2 * i + 0.15 * t, 2) for t in range(4)] for i in range(n)],
        norms=[[round(0.1 + 0.2 * ((i + 2 * t) % 5), 2) for t in range(4)] for i in range(n)],
        states=[[float(m and 1 + (i + t) % 2) for t, m in enumerate(mask)] for i, mask in enumerate(masks)],
        entropies=[[round(1.4 - 0.1 * i - 0.25 * t + 0.2 * (t == 2), 2) for t in range(4)] for i in range(n)],
        baselines=[0.5, 0.5, 0.5, -0.25, -0.25, -0.25][:n],
        steps=[[float(t == 1 or t == 3 - i % 2) for t in range(4)] for i in range(n)],
        components={"correct": scores, "format": [0.2, 0.0, 0.1, 0.1, 0.3, 0.0][:n]},
    )


@dataclass(frozen=True)
class Scenario:
    """A batch, and what it probes."""

    probes: str
    batch: Batch
    convention: str = ""


MIXED = [1.0, 0.0, 0.5, 0.25, 0.75, -0.4]
PLAIN = batch(MIXED, PREFIXES, "aaabbb")
SCENARIOS = {
    "same_lengths": Scenario("the formula alone: two groups, all responses as long", batch(MIXED, FULL, "aaabbb")),
    "lengths": Scenario("responses of different lengths, negative scores", PLAIN),
    "holes": Scenario("masks with holes (a tool's words), rows of two groups in turns", batch(MIXED, HOLES, "abbaba")),
    "off_mask_reward": Scenario(
        "the score lies on a token that does not train, behind the last one that does",
        replace(PLAIN, rewards=[[0.0, 0.0, 0.0, score] for score in MIXED]),
        "a reward behind a trained token belongs to what follows that token",
    ),
    "empty_row": Scenario(
        "a response of which no token trains: its score counts for its group, it trains nothing",
        batch(MIXED, [*PREFIXES[:2], [0.0] * 4, *PREFIXES[3:]], "aaabbb"),
        "the paper knows no such response",
    ),
    "group_of_one": Scenario(
        "a group of one response, beside a group of four",
        batch([0.9, *MIXED[:4]], PREFIXES[:5], "cbbbb"),
        "the paper needs at least two responses; here one alone is its own mean, so that it teaches nothing",
    ),
    "equal_group": Scenario(
        "a group of equal scores, whose mean and deviation in float32 are not exact: it must not be blown up",
        batch([0.9, 0.9, 0.9, 0.25, 0.75, -0.4], PREFIXES, "aaabbb"),
    ),
    "all_failed": Scenario("all scores are 0: nothing is divided by 0", batch([0.0] * 6, PREFIXES, "aaabbb")),
    "dense": Scenario(
        "rewards on many tokens, some of them negative",
        replace(PLAIN, rewards=[[0.1, -0.2, 0.3, round(0.2 * i, 1)] for i in range(6)], masks=FULL),
    ),
    "missing": Scenario(
        "components that do not apply to some responses",
        replace(PLAIN, components={"correct": MIXED, "format": [0.2, NAN, 0.1, 0.1, 0.3, NAN]}),
        "the paper knows no missing score: it is left out of its group's statistics and adds nothing",
    ),
}


@dataclass(frozen=True)
class Entry:
    """How an estimator is probed.

    Attributes:
        arxiv: of its paper.
        equation: in plain text.
        reads: what it reads besides rewards, mask and groups, by the names of `Batch`.
        settings: of every case, by verl's names.
        scenarios: which of `SCENARIOS`.
        also: more cases: (name, scenario, settings, what it probes).
        groups: whether it compares responses to one prompt.
        returns: whether its returns are another output than its advantages.
        convention: of every case.
    """

    arxiv: str
    equation: str
    reads: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    scenarios: tuple[str, ...] = ("same_lengths", "lengths", "holes", "empty_row", "group_of_one", "equal_group")
    also: tuple[Probe, ...] = ()
    groups: bool = True
    returns: bool = False
    convention: str = ""


BY_STD: Mapping[str, Any] = {"norm_adv_by_std_in_grpo": True}
ALL = (*Entry("", "").scenarios, "all_failed")
TOKENS = ("same_lengths", "lengths", "holes", "off_mask_reward", "empty_row", "dense")
EPSILON = "1e-6 is added to the standard deviation, as in verl"
WHITENED = "whitening adds 1e-8 to the variance over the trained tokens, as in verl"

ENTRIES: dict[str, Entry] = {
    "grpo": Entry(
        "2402.03300",
        "A_i,t = (r_i - mean(r)) / std(r) over the group (section 4.1.2); std with n - 1",
        settings=BY_STD,
        scenarios=ALL,
        also=(("dr_grpo", "lengths", {"norm_adv_by_std_in_grpo": False}, "Dr. GRPO (2503.20783): no division by std"),),
        convention=EPSILON,
    ),
    "grpo_passk": Entry(
        "2503.19595",
        "A_i = (r_i - second best r) / std(r) for the best response of a group, 0 for the others",
        settings=BY_STD,
        also=(("no_std", "lengths", {"norm_adv_by_std_in_grpo": False}, "no division by std"),),
        convention=EPSILON,
    ),
    "rloo": Entry("2402.14740", "A_i = r_i - 1/(k-1) sum_(j != i) r_j", scenarios=ALL),
    "opo": Entry("2505.23585", "A_i = r_i - sum_j(l_j r_j) / sum_j(l_j), l the lengths", scenarios=ALL),
    "gpg": Entry(
        "2504.02546",
        "A_i = alpha (r_i - mean(r)) / F_norm, alpha = responses of the batch / those that teach",
        settings={"f_norm": 1.0},
        scenarios=ALL,
        convention="alpha counts responses whose score is not 0, as in verl; the paper counts groups with a spread",
    ),
    "maxrl": Entry(
        "2602.02710",
        "A_i = (r_i - mean(r)) / mean(r)",
        scenarios=ALL,
        convention="0 where the mean of a group is not above 0",
    ),
    "lite_ppo": Entry(
        "2508.08221",
        "A_i = (r_i - mean(r of the group)) / std(r of the batch)",
        scenarios=ALL,
        convention=EPSILON,
    ),
    "scale_rl": Entry(
        "2510.13786",
        "A_i = (r_i - mean(r of the group)) / std(the differences r - mean of the batch)",
        scenarios=ALL,
        convention=EPSILON,
    ),
    "rl_zvp": Entry(
        "2509.21880",
        "A_i,t = alpha H_t if all responses of the group are right, -alpha (max H - H_t) if all are wrong, else GRPO's",
        reads=("entropies",),
        settings={**BY_STD, "zvp_alpha": 0.1},
        scenarios=ALL,
        convention=EPSILON,
    ),
    "reinforce_plus_plus": Entry(
        "2501.03262",
        "A_t = (G_t - mean) / std over all tokens of the batch, G_t = sum_(k >= t) gamma^(k-t) r_k",
        settings={"gamma": 1.0},
        scenarios=TOKENS,
        also=(("discounted", "holes", {"gamma": 0.9}, "a discount, and tokens in between that do not train"),),
        groups=False,
        returns=True,
        convention=WHITENED,
    ),
    "reinforce_plus_plus_baseline": Entry(
        "2501.03262",
        "A_i,t = (r_i - mean(r of the group)), less their mean and divided by their std over all tokens of the batch",
        scenarios=ALL,
        convention=WHITENED,
    ),
    "remax": Entry(
        "2310.10505",
        "A_t = sum_(k >= t) r_k - r(greedy response)",
        reads=("baselines",),
        scenarios=TOKENS,
        groups=False,
        returns=True,
    ),
    "distill": Entry(
        "2306.08543",
        "A_t = G_t = sum_(k >= t) gamma^(k-t) r_k (eq. 3), r the log-ratio of teacher and student",
        settings={"gamma": 1.0},
        scenarios=TOKENS,
        also=(("discounted", "holes", {"gamma": 0.0}, "each token answers for itself"),),
        groups=False,
    ),
    "gae": Entry(
        "1506.02438",
        "A_t = sum_l (gamma lam)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t (eq. 16)",
        reads=("values",),
        settings={"gamma": 1.0, "lam": 0.95},
        scenarios=TOKENS,
        also=(("discounted", "holes", {"gamma": 0.9}, "a discount, and tokens in between that do not train"),),
        groups=False,
        returns=True,
        convention="advantages are whitened: 1e-8 is added to the variance over the trained tokens, as in verl",
    ),
    "optimal_token_baseline": Entry(
        "2602.07078",
        "A_i,t = G_i,t - sum_j G_j,t W_j,t / sum_j W_j,t, W_t = sum_(u <= t) (1 - 2 p_u + sum_v p_v^2)",
        reads=("norms",),
        scenarios=(*TOKENS, "group_of_one"),
        returns=True,
        convention="t counts the tokens that train; a response alone at t is its own baseline",
    ),
    "a2po": Entry(
        "2505.20686",
        "A_i = r_i - V, V = beta ln mean(exp(r / beta)) (eq. 4)",
        settings={"a2po_beta": 0.5},
        scenarios=ALL,
        convention="V is the group's",
    ),
    "rae": Entry(
        "2506.24119",
        "A_i = r_i - b, b the moving average of the agent's rewards",
        settings={"agent_baselines": {"0": 0.25}},
        scenarios=TOKENS,
        groups=False,
        convention="b is that of the steps before",
    ),
    "gigpo": Entry(
        "2505.10978",
        "A = A_episode + w A_step (eq. 8): the discounted return of a turn, normalised over the turns from its state",
        reads=("states",),
        settings={**BY_STD, "gamma": 0.95, "step_advantage_w": 1.0},
        scenarios=("same_lengths", "lengths", "holes", "empty_row", "group_of_one", "dense"),
        also=(("no_std", "holes", {"norm_adv_by_std_in_grpo": False}, "no division by std"),),
        convention=f"{EPSILON}; a turn is a run of tokens that train, and what lies behind it is its reward",
    ),
    "grpo_process": Entry(
        "2402.03300",
        "A_t = sum over the steps that end at or after t of (r - mean(all step rewards of the group)) / std (4.1.3)",
        reads=("steps",),
        settings=BY_STD,
        scenarios=("dense", "lengths", "group_of_one", "all_failed"),
        convention=EPSILON,
    ),
    "gdpo": Entry(
        "2601.05242",
        "A = whiten over the batch of sum_k w_k (r_k - mean_k) / std_k, each component k within its group",
        reads=("components",),
        settings={"gdpo_reward_weights": [1.0, 0.5]},
        scenarios=("same_lengths", "lengths", "holes", "empty_row", "equal_group", "missing"),
        convention="mean and deviation of the batch are over its trained tokens, as in verl; in the paper over "
        "responses",
    ),
}

NAMES = {
    "values": "values",
    "entropies": "entropies",
    "norms": "gradient_norms",
    "states": "turn_states",
    "baselines": "reward_baselines",
    "steps": "step_mask",
    "components": "reward_components",
}


def inputs(of: Batch, entry: Entry) -> dict[str, Any]:
    """What an implementation is given, by the names of verl's columns."""
    columns: dict[str, Any] = {"token_level_rewards": of.rewards, "response_mask": whole(of.masks)}
    if entry.groups:
        columns["index"] = of.index
    for name in entry.reads:
        values = getattr(of, name)
        if isinstance(values, dict):
            values = {key: [None if score != score else score for score in row] for key, row in values.items()}
        columns[NAMES[name]] = whole(values) if name in ("steps", "states") else values
    return columns


def expected(name: str, of: Batch, settings: Mapping[str, Any], returns: bool) -> dict[str, Any]:
    """The outputs, by the paper's formula."""
    known = {int(role): value for role, value in settings.get("agent_baselines", {}).items()}
    found = ESTIMATORS[name](of, {**settings, "agent_baselines": known})
    outputs = {"advantages": rounded(masked(found[0], of.masks))}
    return outputs | ({"returns": rounded(masked(found[1], of.masks))} if returns else {})


def groups() -> list[Group]:
    """All groups of cases of this kind."""
    result = []
    for name, entry in ENTRIES.items():
        cases = []
        for title, scenario, more, probes in probed(entry, SCENARIOS):
            settings = {**entry.settings, **more}
            outputs = expected(name, scenario.batch, settings, entry.returns)
            convention = "; ".join(filter(None, (scenario.convention, entry.convention)))
            cases.append(Case(title, probes, settings, inputs(scenario.batch, entry), outputs, convention))
        result.append(Group("advantage", name, entry.arxiv, entry.equation, cases))
    return result
