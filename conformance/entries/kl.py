"""Cases of the KL estimators: value of each token, and the gradient of their sum. See `ENTRIES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conformance.form import GRADIENT_DIGITS, Case, Group, masked, rounded, whole
from conformance.gradients import slope
from conformance.papers import Rows, kl

MASKS = [[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
POLICY = [[-1.2, -0.4, -2.1, -0.7], [-0.9, -1.6, -3.0, -0.1], [-0.3, -2.4, -1.1, -5.0]]
OLD = [[-1.4, -0.3, -2.0, -1.2], [-0.7, -1.1, -3.6, -0.4], [-0.5, -2.0, -1.3, -4.0]]
NEAR = [[-1.3, -0.5, -1.7, -1.1], [-0.6, -2.6, -3.4, -0.9], [-0.9, -1.4, -1.6, -4.0]]
FAR = [[-6.0, -0.9, -0.3, -9.5], [-12.0, -1.0, -0.2, -0.3], [-0.9, -1.4, -1.6, -4.0]]
PROBES = {
    "near": ("a reference that is close, on both sides; a mask with holes, an empty row", NEAR),
    "same": ("the reference is the policy: the KL is 0", POLICY),
    "far": ("log-ratios of up to 11, where the policy is likelier and where the reference is", FAR),
}
BOUNDED = "k3 is at most 10, as in verl; Schulman's has no bound"

Estimator = Callable[..., float]


@dataclass(frozen=True)
class Entry:
    """How an estimator is probed.

    Attributes:
        arxiv: of its paper.
        equation: in plain text.
        value: of log p, log q and log p_old.
        slope: what the gradient is that of.
        cases: which of `PROBES`.
        reads_old: whether it reads log p_old.
    """

    arxiv: str
    equation: str
    value: Estimator
    slope: Estimator
    cases: tuple[str, ...] = ("near", "same", "far")
    reads_old: bool = False


SCHULMAN = "Schulman 2020, joschu.net/blog/kl-approx.html"
ENTRIES: dict[str, Entry] = {
    "k1": Entry(SCHULMAN, "log p - log q", *kl.ESTIMATORS["k1"]),
    "abs": Entry(SCHULMAN, "|log p - log q|, not in this text: verl's", *kl.ESTIMATORS["abs"], ("near", "far")),
    "k2": Entry(SCHULMAN, "(log p - log q)^2 / 2", *kl.ESTIMATORS["k2"]),
    "k3": Entry("2402.03300", "q/p - log(q/p) - 1 (eq. 4)", *kl.ESTIMATORS["k3"]),
    "unbiased_k3": Entry(
        "2512.02556",
        "p/p_old (q/p - log(q/p) - 1), differentiated through both factors",
        kl.unbiased_k3,
        kl.unbiased_k3,
        ("near", "same"),
        reads_old=True,
    ),
} | {
    f"{name}+": Entry(
        "2506.09477",
        f"the value of {name} with the gradient of k2, (log p - log q) grad log p",
        *kl.ESTIMATORS[f"{name}+"],
        ("near", "far"),
    )
    for name in ("k1", "abs", "k3")
}
LOGITS = [[[0.3, -1.2, 2.0], [0.1, 0.4, -0.6]], [[4.0, 0.0, -3.0], [-0.5, 1.5, 0.2]]]
REFERENCES = [[[0.1, -0.2, 1.0], [0.1, 0.4, -0.6]], [[-6.0, 5.0, 1.0], [0.3, 0.2, 0.1]]]


def tokens(estimator: Estimator, entry: Entry, reference: Rows, derive: bool) -> Rows:
    """The estimator, or its derivative by log p, at each token."""

    def at(i: int, t: int) -> float:
        others = (reference[i][t], OLD[i][t]) if entry.reads_old else (reference[i][t],)
        if derive:
            return slope(lambda x: estimator(x, *others), POLICY[i][t])
        return estimator(POLICY[i][t], *others)

    return [[at(i, t) if counts else 0.0 for t, counts in enumerate(mask)] for i, mask in enumerate(MASKS)]


def sampled(name: str, entry: Entry) -> Group:
    """The group of an estimator from the log-probs of sampled tokens."""
    cases = []
    for title in entry.cases:
        probes, reference = PROBES[title]
        columns = {"log_probs": POLICY, "ref_log_probs": reference} | (
            {"old_log_probs": OLD} if entry.reads_old else {}
        )
        value = tokens(entry.value, entry, reference, derive=False)
        gradient = tokens(entry.slope, entry, reference, derive=True)
        outputs = {"kl": rounded(masked(value, MASKS)), "gradient": rounded(gradient, GRADIENT_DIGITS)}
        convention = BOUNDED if "k3" in name and title == "far" else ""
        cases.append(Case(title, probes, {}, {**columns, "response_mask": whole(MASKS)}, outputs, convention))
    return Group("kl", name, entry.arxiv, entry.equation, cases)


def over_the_vocabulary() -> Group:
    """The group of the exact KL, which takes logits: a gradient for each of them."""

    def moved(row: list[float], reference: list[float], v: int) -> float:
        return slope(lambda x: kl.full([*row[:v], x, *row[v + 1 :]], reference), row[v])

    pairs = [list(zip(*rows, strict=True)) for rows in zip(LOGITS, REFERENCES, strict=True)]
    value = [[kl.full(*pair) for pair in row] for row in pairs]
    gradient = [[[moved(*pair, v) for v in range(3)] for pair in row] for row in pairs]
    outputs: dict[str, Any] = {"kl": rounded(value), "gradient": rounded(gradient, GRADIENT_DIGITS)}
    probes = "logits near and far from the reference's, and equal to them; gradient by the policy's logits"
    case = Case("logits", probes, {}, {"logits": LOGITS, "ref_logits": REFERENCES}, outputs)
    equation = "sum over the vocabulary of p log(p/q)"
    return Group("kl", "full", "Kullback and Leibler 1951", equation, [case])


def groups() -> list[Group]:
    """All groups of cases of this kind."""
    return [*(sampled(name, entry) for name, entry in ENTRIES.items()), over_the_vocabulary()]
