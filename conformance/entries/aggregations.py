"""Cases of the aggregations: token losses to one number, of the whole and of micro-batches. See `ENTRIES`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conformance.form import Case, Group, rounded, whole
from conformance.papers import Rows
from conformance.papers.aggregates import AGGREGATES, prompt_mean

LOSSES = [[0.5, -1.25, 2.0, 0.75], [3.0, 0.25, -0.5, 40.0], [-1.0, 1.5, 0.25, 30.0], [0.125, -2.0, 1.0, -0.75]]
INDEX = ["a", "b", "a", "b"]
LENGTHS = [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
HOLES = [[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]]
EMPTY = [[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]]
NONE = "a response without a token is none: it does not count in means over responses"
# What the losses of Dr. GRPO's code are divided by.
SCALE = 8
PROBES = {
    "lengths": ("responses of different lengths", LENGTHS, ""),
    "holes": ("masks with holes", HOLES, ""),
    "empty_row": ("a response of which no token counts", EMPTY, NONE),
    "nothing": ("no token counts at all: the loss is 0", [[0.0] * 4] * 4, "nothing has the mean 0"),
}
PARTS = [[0, 1], [2, 3]]


@dataclass(frozen=True)
class Entry:
    """How an aggregation is probed: its paper and the equation in plain text."""

    arxiv: str
    equation: str


ENTRIES: dict[str, Entry] = {
    "token-mean": Entry("2503.14476", "1 / sum_i |o_i| sum_i sum_t l_i,t (DAPO, eq. 8)"),
    "token-sum": Entry("2503.14476", "sum_i sum_t l_i,t, the numerator of DAPO's mean"),
    "prompt-mean": Entry("2510.13786", "mean over prompts of the mean over all tokens of their responses (ScaleRL)"),
    "seq-mean-token-mean": Entry("2402.03300", "1/G sum_i 1/|o_i| sum_t l_i,t (GRPO, eq. 3)"),
    "seq-mean-token-sum": Entry("2503.20783", "1/G sum_i sum_t l_i,t (Dr. GRPO)"),
    "seq-mean-token-sum-norm": Entry("2503.20783", "1/G sum_i 1/L sum_t l_i,t, L a constant (Dr. GRPO, its code)"),
}


def value(name: str, masks: Rows) -> float:
    """The aggregate by the paper's formula."""
    if name == "prompt-mean":
        return prompt_mean(LOSSES, masks, INDEX)
    return AGGREGATES[name](LOSSES, masks, SCALE)


def groups() -> list[Group]:
    """All groups of cases of this kind."""
    result = []
    for name, entry in ENTRIES.items():
        settings: dict[str, Any] = {"loss_scale_factor": SCALE} if name.endswith("norm") else {}
        cases = []
        for title, (probes, masks, convention) in PROBES.items():
            columns: dict[str, Any] = {"losses": LOSSES, "response_mask": whole(masks)}
            columns |= {"index": INDEX} if name == "prompt-mean" else {}
            means = convention if "mean" in name else ""
            outputs = {"loss": rounded(value(name, masks))}
            cases.append(Case(title, probes, settings, columns, outputs, means))
            if title in ("lengths", "empty_row"):
                parts = f"{probes}, in micro-batches of 2 rows, which add up to the loss of the whole"
                cases.append(
                    Case(f"{title}_in_parts", parts, {**settings, "micro_batches": PARTS}, columns, outputs, means)
                )
        result.append(Group("aggregation", name, entry.arxiv, entry.equation, cases))
    return result
