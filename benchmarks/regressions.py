"""Has something become slower? `make bench`: short benchmarks against benchmarks/baseline.json, in a few minutes.

    python -m benchmarks.regressions [PART ...]     some parts only
    python -m benchmarks.regressions --write        measures all parts anew and makes them the baseline

Only ratios are compared, each of two things measured in turns on one machine, and of all of them higher is better. They
differ between kinds of processors, so each kind has a baseline of its own. The exit code is 1 if a ratio has fallen by
more than a fifth, or is no longer measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record

BASELINE = record.ROOT / "benchmarks/baseline.json"
TOLERANCE = 0.2
# Commands by part; the names of a part's ratios begin with its own.
PARTS = {
    "update": ("benchmarks.update", "--parts", "a"),
    "head": ("benchmarks.update", "--parts", "c"),
    "rollout": ("benchmarks.rollout", "--parts", "a"),
    "weight_sync": ("benchmarks.rollout", "--parts", "b", "--rounds", "6"),
    "control_plane": (
        *("benchmarks.rollout", "--parts", "c"),
        *("--samples", "4000", "--workers", "16", "--control-rounds", "8"),
    ),
}
WORSE, GONE, BETTER, NEW = "REGRESSION", "NOT MEASURED", "better", "new"
FAILURES = {WORSE, GONE}


def main() -> None:
    """Measure, compare, print; exit with 1 for a regression."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without one")
    parser.add_argument("--write", action="store_true", help="make the figures this kind of processor's baseline")
    arguments = parser.parse_args()
    if wrong := set(arguments.parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(wrong))}; there are {', '.join(PARTS)}")
    if arguments.write and arguments.parts:
        parser.error("--write measures all parts: a baseline is of one commit")
    parts = arguments.parts or list(PARTS)
    head, ratios = record.begun(), measure(parts)
    kind, baselines = record.capability(), json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    print("\n" + report(kind, head, ratios, baselines, parts))
    if arguments.write:
        baselines[kind] = {key: head[key] for key in ("machine", "commit", "dirty")} | {"ratios": ratios}
        BASELINE.write_text(json.dumps(baselines, indent=2, sort_keys=True) + "\n")
        print(f"{BASELINE} now holds these as {kind}'s.")
    elif has_failed(compare(ratios, expected(kind, baselines, parts))):
        sys.exit(1)


def measure(parts: Sequence[str]) -> dict[str, float]:
    """The ratios of the parts, each measured in a process of its own."""
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            file = Path(folder) / f"{part}.json"
            module, *arguments = PARTS[part]
            command = [sys.executable, "-m", module, "--short", *arguments, "--output", str(file)]
            print(f"{part} ...", file=sys.stderr)
            subprocess.run(command, cwd=record.ROOT, check=True, stdout=sys.stderr)
            ratios |= json.loads(file.read_text())["ratios"]
    return ratios


def expected(kind: str, baselines: Mapping[str, Any], parts: Sequence[str]) -> dict[str, float]:
    """The baseline's ratios of these parts on this kind of processor; none where it has no baseline."""
    ratios = baselines.get(kind, {}).get("ratios", {})
    return {name: value for name, value in ratios.items() if name.partition("/")[0] in parts}


def compare(now: Mapping[str, float], then: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each ratio; without a baseline there is nothing to compare, and nothing fails."""
    return [_row(name, now.get(name), then.get(name), bool(then)) for name in (*then, *(now.keys() - then.keys()))]


def _row(name: str, now: float | None, then: float | None, has_baseline: bool) -> dict[str, Any]:
    change, verdict = "-", ""
    if now is None:
        verdict = GONE
    elif then is None:
        verdict = NEW if has_baseline else ""
    else:
        change = f"{now / then - 1:+.0%}"
        # A number that is none is a regression, too.
        verdict = BETTER if now > then * (1 + TOLERANCE) else "" if now >= then * (1 - TOLERANCE) else WORSE
    shown = ["-" if value is None else value for value in (now, then)]
    return {"ratio": name, "now": shown[0], "baseline": shown[1], "change": change, "": verdict}


def has_failed(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a ratio has fallen too far or is gone."""
    return any(row[""] in FAILURES for row in rows)


def report(
    kind: str, head: Mapping[str, Any], now: Mapping[str, float], baselines: Mapping[str, Any], parts: Sequence[str]
) -> str:
    """The table, and what it is compared with."""
    rows = compare(now, expected(kind, baselines, parts))
    lines = [record.table(f"Ratios on {kind} (higher is better)", rows), f"now:      {_origin(head)}"]
    if kind in baselines:
        lines.append(f"baseline: {_origin(baselines[kind])}")
        failed = sum(row[""] in FAILURES for row in rows)
        lines.append(
            f"{failed} of {len(rows)} fell by more than {TOLERANCE:.0%} or are gone" if failed else "no regression"
        )
    else:
        known = ", ".join(baselines) or "none"
        lines.append(
            f"There is no baseline of {kind} to compare with (there is: {known}). `make bench-baseline` writes it."
        )
    return "\n".join(lines)


def _origin(head: Mapping[str, Any]) -> str:
    machine, commit = head["machine"], (head["commit"] or "no commit")[:12]
    changed = " with changes" if head["dirty"] else ""
    return f"{commit}{changed}, {machine['cores']} cores, load {machine['load'][0]}, torch {machine['torch']}"


if __name__ == "__main__":
    main()
