"""Draw the validation accuracy of runs into the picture at the top of README, in place of what is drawn there.

usage: python scripts/overview_curves.py docs/images/overview.svg RUN_DIR [RUN_DIR ...]

The points are (step, accuracy), at the picture's own coordinates: viewers differ in what they make of strokes that are
scaled.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from grpo_dist.tracking.jsonl import read_metrics
from grpo_dist.tracking.metric_names import validation_accuracy

# Where the picture's axes begin, and how long a step and an accuracy of 1 are; they end at step 25 and accuracy 1.
LEFT, BOTTOM, STEP, WHOLE = 684, 270, 9.6, 186
CURVES = re.compile(r'(<g id="curves"[^>]*>\n).*?(  </g>)', re.DOTALL)


def lines(run_dir: Path) -> str:
    """A run's line, and a dot for each validation."""
    values = ((row["step"], validation_accuracy(row)) for row in read_metrics(run_dir / "metrics.jsonl"))
    places = [(LEFT + STEP * step, BOTTOM - WHOLE * value) for step, value in values if value is not None]
    points = [(f"{round(x, 2):g}", f"{round(y, 2):g}") for x, y in places]
    dots = "".join(f'<circle class="point" cx="{x}" cy="{y}" r="3"/>' for x, y in points)
    return f'    <polyline class="curve" points="{" ".join(map(",".join, points))}"/>\n    {dots}\n'


def main(argv: list[str]) -> None:
    """Write the curves into the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", type=Path)
    options = parser.parse_args(argv)
    drawn = "".join(lines(run_dir) for run_dir in options.run_dirs)
    text, number = CURVES.subn(rf"\g<1>{drawn}\g<2>", options.picture.read_text())
    if number != 1:
        sys.exit(f'{options.picture}: needs one <g id="curves">, has {number}')
    options.picture.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
