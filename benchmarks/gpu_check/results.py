"""What the parts find: figures, one JSON file for each part, and the table of all. Loads neither torch nor Ray."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["done", "skipped", "failed", "out of memory"]
SHOWN_REASON = 300  # characters of a reason in the table; results.json has all of it


@dataclass(frozen=True)
class Figure:
    """One thing that a part has found.

    Attributes:
        what: what was measured.
        value: None where it could not be; `note` then says why.
        unit: of the value.
        expected: what it is held against, in words; "" if nothing.
        met: whether it is as expected; None where nothing is.
        note: what else there is to say.
    """

    what: str
    value: float | None
    unit: str = ""
    expected: str = ""
    met: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Result:
    """What became of a part.

    Attributes:
        part: its name.
        status: how it ended.
        setup: what it ran on; a result of another setup does not count.
        reason: why it was skipped, or failed.
        seconds: from its process's start to its end.
        figures: what it found.
    """

    part: str
    status: Status
    setup: Mapping[str, Any]
    reason: str = ""
    seconds: float = 0.0
    figures: tuple[Figure, ...] = ()


def largest(values: Iterable[float]) -> float:
    """The largest; nan if any is, which `max` might pass over."""
    found = list(values)
    return next((value for value in found if value != value), max(found))


@dataclass
class Findings:
    """The figures of a part while they are being taken.

    Args:
        holds: whether speeds and memory are held against what is expected of a GPU. Correctness always is.
    """

    holds: bool
    figures: list[Figure] = field(default_factory=list)

    def note(self, what: str, value: float, unit: str = "", note: str = "") -> None:
        """A figure that is held against nothing."""
        self.figures.append(Figure(what, value, unit, note=note))

    def missing(self, what: str, why: str) -> None:
        """A figure that cannot be taken here."""
        self.figures.append(Figure(what, None, note=why))

    def right(self, what: str, value: float, most: float, unit: str = "", note: str = "") -> None:
        """A figure of correctness: at most `most`, on every device and at every scale; nan is not."""
        self.figures.append(Figure(what, value, unit, f"<= {most:g}", value <= most, note))

    def at_least(self, what: str, value: float, least: float, unit: str = "", note: str = "") -> None:
        """A speed."""
        self._held(what, value, unit, f">= {least:g}", value >= least, note)

    def at_most(self, what: str, value: float, most: float, unit: str = "", note: str = "") -> None:
        """A size."""
        self._held(what, value, unit, f"<= {most:g}", value <= most, note)

    def within(self, what: str, value: float, low: float, high: float, unit: str = "", note: str = "") -> None:
        """A ratio to a plan."""
        self._held(what, value, unit, f"{low:g} to {high:g}", low <= value <= high, note)

    def _held(self, what: str, value: float, unit: str, expected: str, met: bool, note: str) -> None:
        figure = Figure(what, value, unit, expected, met, note) if self.holds else Figure(what, value, unit, note=note)
        self.figures.append(figure)


def write_json(path: Path, value: Any) -> None:
    """The file is there whole or not at all, and an earlier one stays until then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def write_result(folder: Path, result: Result) -> None:
    """Keep a part's result."""
    write_json(folder / f"{result.part}.json", asdict(result))


def read_result(folder: Path, part: str, setup: Mapping[str, Any]) -> Result | None:
    """The result of a part on this setup, if there is one."""
    try:
        found = json.loads((folder / f"{part}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if found["setup"] != dict(setup):
        return None
    return Result(**found | {"figures": tuple(Figure(**each) for each in found["figures"])})


def all_well(results: Sequence[Result]) -> bool:
    """Whether no part failed or ran out of memory, and no figure is other than expected."""
    ended = all(result.status in ("done", "skipped") for result in results)
    return ended and not any(figure.met is False for result in results for figure in result.figures)


def table(results: Sequence[Result]) -> str:
    """Part, figure, expectation and verdict, in columns."""
    lines = [("part", "what", "figure", "expected", "verdict"), *(line for each in results for line in _lines(each))]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    )


def _lines(result: Result) -> Iterator[tuple[str, ...]]:
    for figure in result.figures:
        shown = "-" if figure.value is None else f"{_number(figure.value)} {figure.unit}".strip()
        verdict = {None: "", True: "ok", False: "MISSED"}[figure.met]
        yield result.part, figure.what, shown, figure.expected, "; ".join(filter(None, (verdict, figure.note)))
    if result.status != "done":
        reason = " ".join(result.reason.split())
        short = reason if len(reason) <= SHOWN_REASON else f"{reason[:SHOWN_REASON]} ..."
        yield result.part, "", "", "", f"{result.status.upper()}: {short}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
