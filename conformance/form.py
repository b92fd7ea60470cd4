"""The form of a case file: how it is written, read and compared. Needs Python alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1
CASES = Path(__file__).parent / "cases"
# Significant digits of an expected number, counted from the largest of its output.
DIGITS = 12
# Values are exact but for the rounding of float64; gradients are differences of them.
GRADIENT_DIGITS = 10
# Numbers agree that differ by less than this share of the largest expected one of the output. Implementations compute
# in float32, whose rounding is 6e-8, and whiten or subtract means.
TOLERANCE = 2e-5
# What counts on the tokens of the mask alone: a loss never reads it elsewhere.
ON_MASK = ("advantages", "returns", "kl", "weights")

Values = Any  # a number, null, or nested lists and objects of them


@dataclass(frozen=True)
class Case:
    """One case of a group.

    Attributes:
        name: of the case, unique within its group.
        probes: what implementations get wrong here.
        settings: of the objective, by verl's names.
        inputs: (N, T) and (N,) numbers by name; null is a number that is missing.
        expected: outputs by name.
        convention: what the expected numbers rest on that the paper leaves open or has otherwise; often nothing.
    """

    name: str
    probes: str
    settings: dict[str, Any]
    inputs: dict[str, Any]
    expected: dict[str, Any]
    convention: str = ""


@dataclass(frozen=True)
class Group:
    """The cases of one objective.

    Attributes:
        kind: advantage, policy_loss, kl, aggregation or correction.
        name: of the objective, verl's where it has one.
        arxiv: the paper, or another source where it is not on arXiv.
        equation: its equation, in plain text.
        cases: of the group.
    """

    kind: str
    name: str
    arxiv: str
    equation: str
    cases: list[Case] = field(default_factory=list)

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.kind}_{self.name.replace('-', '_').replace('+', '_straight_through')}.json"

    def document(self) -> dict[str, Any]:
        """What its file holds."""
        cases = []
        for case in self.cases:
            convention = {"convention": case.convention} if case.convention else {}
            head = {"name": case.name, "probes": case.probes} | convention
            cases.append(head | {"settings": case.settings, "inputs": case.inputs, "expected": case.expected})
        paper = {"arxiv": self.arxiv, "equation": self.equation}
        return {"version": VERSION, "kind": self.kind, "name": self.name, "paper": paper, "cases": cases}


def read(file: Path) -> Group:
    """The group that a file holds.

    Raises:
        ValueError: the file has another version than this program reads.
    """
    document = json.loads(file.read_text())
    if document["version"] != VERSION:
        raise ValueError(f"{file}: version {document['version']}, this program reads version {VERSION}")
    cases = [Case(**case) for case in document["cases"]]
    return Group(document["kind"], document["name"], **document["paper"], cases=cases)


def read_all(folder: Path = CASES) -> list[Group]:
    """All groups of a folder, by file name."""
    return [read(file) for file in sorted(folder.glob("*.json"))]


def text(value: Values, depth: int = 0) -> str:
    """JSON with a line for each row of numbers."""
    indent, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict) and value:
        lines = (f"{indent}{json.dumps(key)}: {text(item, depth + 1)}" for key, item in value.items())
        return "{\n" + ",\n".join(lines) + f"\n{outer}}}"
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        return "[\n" + ",\n".join(indent + text(item, depth + 1) for item in value) + f"\n{outer}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def numbers(value: Values) -> Iterator[float]:
    """All numbers of an output, in order; what is missing is nan."""
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    else:
        yield math.nan if value is None else float(value)


def rounded(value: Values, digits: int = DIGITS, largest: float | None = None) -> Values:
    """An output with so many significant digits, counted from its largest number."""
    if largest is None:
        largest = max((abs(number) for number in numbers(value)), default=0.0)
        if largest < 1e-9:  # rounding of what is 0
            largest = 1.0
    if isinstance(value, list):
        return [rounded(item, digits, largest) for item in value]
    decimals = digits - 1 - math.floor(math.log10(largest))
    return round(float(value), decimals) + 0.0  # no -0.0


def whole(mask: Values) -> Values:
    """A mask as whole numbers."""
    return [[int(place) for place in row] for row in mask]


def masked(value: Values, mask: Values) -> Values:
    """Numbers of an (N, T) output off the mask as 0."""
    return [
        [v if m else 0.0 for v, m in zip(row, places, strict=True)] for row, places in zip(value, mask, strict=True)
    ]


def difference(found: Values, expected: Values) -> float:
    """The largest difference of any two numbers as a share of the largest expected one, of 1 where all are 0.

    Infinite where a number is none, or where there are more or fewer of them.
    """
    pairs = list(numbers(found)), list(numbers(expected))
    if len(pairs[0]) != len(pairs[1]) or not all(map(math.isfinite, pairs[0])):
        return math.inf
    largest = max(map(abs, pairs[1]), default=0.0) or 1.0
    return max((abs(a - b) for a, b in zip(*pairs, strict=True)), default=0.0) / largest


def differences(found: dict[str, Values], case: Case) -> dict[str, float]:
    """`difference` of each expected output that was found."""
    mask = case.inputs.get("response_mask")
    result = {}
    for name, expected in case.expected.items():
        if name in found:
            pair = found[name], expected
            if name in ON_MASK and mask is not None:
                pair = masked(pair[0], mask), masked(pair[1], mask)
            result[name] = difference(*pair)
    return result
