"""What a machine with one NVIDIA GPU shows, part by part: `python -m benchmarks.gpu_check` prints a table, writes JSON.

The engine layer needs torch >= 2.11, transformers, safetensors and pydantic; the others what `DEVICE=gpu make setup`
installs. A check that was cut off goes on where it was; what was skipped or has failed is tried again. Exit codes: 0
all is as expected, 1 something failed or missed what is expected of it, 2 nothing could run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check.parts import NEEDED, PARTS, Part
from benchmarks.gpu_check.results import Result, all_well, table
from benchmarks.gpu_check.runner import Check, find_setup
from benchmarks.gpu_check.scale import SCALES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and say how it went."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "parts: " + "; ".join(f"{part.name} ({part.layer}): {part.measures}" for part in PARTS)
    parser.add_argument("--layer", choices=tuple(NEEDED), help="only the parts of one layer")
    parser.add_argument("--parts", type=_named, help="only these, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_check"), help="folder of the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", choices=tuple(SCALES), default="full", help="small: shows on CPU that it works")
    parser.add_argument("--fresh", action="store_true", help="forget what these parts have found")
    asked = parser.parse_args(arguments)
    parts = [part for part in asked.parts or PARTS if asked.layer in (None, part.layer)]
    if not parts:
        parser.error(f"--layer {asked.layer}: none of --parts is of it")
    check = Check(asked.out, find_setup(asked.device, asked.scale), _say)
    results = check.run(parts, fresh=asked.fresh)
    print(_heading(check), table(results), f"written to {check.out / 'results.json'}", sep="\n")
    return exit_code(results)


def exit_code(results: Sequence[Result]) -> int:
    """0, 1 or 2, as the module says."""
    if all(result.status == "skipped" for result in results):
        return 2
    return 0 if all_well(results) else 1


def _heading(check: Check) -> str:
    return ", ".join(f"{name} {value}" for name, value in check.setup.items() if value is not None)


def _named(names: str) -> list[Part]:
    wanted, known = names.split(","), {part.name: part for part in PARTS}
    if unknown := [name for name in wanted if name not in known]:
        raise argparse.ArgumentTypeError(f"no part is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [part for part in PARTS if part.name in wanted]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
