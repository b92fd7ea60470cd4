"""Check an implementation against the case files: `python -m conformance.check [--implementation NAME] [--json FILE]`.

Exit code 1 if a case differs, where the implementation is grpo_dist; 0 for the others, whose differences are findings.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.adapters import IMPLEMENTATIONS, NotOffered
from conformance.form import CASES, TOLERANCE, Case, Group, differences, read_all

Answer = Callable[[Group, Case], dict[str, Any]]
AGREES, DIFFERS, NOT_OFFERED = "agrees", "differs", "not offered"


@dataclass(frozen=True)
class Result:
    """What became of a case.

    Attributes:
        group: kind/name of its group.
        case: its name.
        status: agrees, differs or not offered.
        difference: the largest of any output, see `form.difference`; None where there is no number.
        reason: which outputs differ, what is not offered, or the error.
    """

    group: str
    case: str
    status: str
    difference: float | None = None
    reason: str = ""


def answers_of(adapter: ModuleType) -> Answer:
    """Ask an adapter by its function for the kind of objective."""
    return lambda group, case: getattr(adapter, group.kind)(group.name, case)  # type: ignore[no-any-return]


def check(answer: Answer, groups: list[Group]) -> list[Result]:
    """The results of all cases."""
    return [check_case(answer, group, case) for group in groups for case in group.cases]


def check_case(answer: Answer, group: Group, case: Case) -> Result:
    """The result of one case. An implementation that fails on it differs."""
    name = f"{group.kind}/{group.name}"
    try:
        found = differences(answer(group, case), case)
    except NotOffered as reason:
        return Result(name, case.name, NOT_OFFERED, reason=str(reason))
    except Exception as error:  # noqa: BLE001 whatever it is, the implementation gives no answer
        return Result(name, case.name, DIFFERS, reason=f"{type(error).__name__}: {error}")
    if not found:
        return Result(name, case.name, NOT_OFFERED, reason="none of the outputs")
    largest = max(found.values())
    beyond = ", ".join(output for output, value in found.items() if value > TOLERANCE)
    finite = largest if math.isfinite(largest) else None
    return Result(name, case.name, DIFFERS if beyond else AGREES, finite, beyond)


def table(results: list[Result]) -> str:
    """Counts of each group, and the largest differences of cases that agree and of those that do not."""
    lines = ["| cases | agree | differ | not offered | where |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(result.group for result in results):
        own = [result for result in results if result.group == name]
        counts = [sum(result.status == status for result in own) for status in (AGREES, DIFFERS, NOT_OFFERED)]
        numbers = " | ".join(str(count) if count else "" for count in counts)
        lines.append(f"| {name} | {numbers} | {'; '.join(map(described, wrong(own)))} |")
    return "\n".join(lines)


def wrong(results: list[Result]) -> list[Result]:
    """Those that differ."""
    return [result for result in results if result.status == DIFFERS]


def described(result: Result) -> str:
    """Which case differs, by how much, and in what."""
    size = "" if result.difference is None else f" {result.difference:.1e}"
    return f"{result.case}{size} ({result.reason})"


def main(arguments: list[str] | None = None) -> int:
    """Print the table; see the module."""
    parser = argparse.ArgumentParser(prog="python -m conformance.check", description=__doc__)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="grpo_dist")
    parser.add_argument("--cases", type=Path, default=CASES, help="folder of the case files")
    parser.add_argument("--json", type=Path, help="write the results of all cases to this file too")
    options = parser.parse_args(arguments)
    adapter = importlib.import_module(f"conformance.adapters.{options.implementation}")
    results = check(answers_of(adapter), read_all(options.cases))
    differ = wrong(results)
    offered = sum(result.status != NOT_OFFERED for result in results)
    print(table(results))
    print(
        f"\n{adapter.version()}: {offered - len(differ)} of {offered} cases agree, {len(results) - offered} not offered"
    )
    if options.json is not None:
        document = {"implementation": adapter.version(), "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(differ) and options.implementation == "grpo_dist")


if __name__ == "__main__":
    sys.exit(main())
