"""Draw the curves of one or more runs: validation accuracy, training reward and response length by step.

usage: python scripts/plot_run.py OUT.png RUN_DIR [RUN_DIR ...]
       python scripts/plot_run.py OUT.png RUN_DIR [RUN_DIR ...] --metric reward_extra/rule/mean --metric actor/kl_loss
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from grpo_dist.tracking.jsonl import read_metrics
from grpo_dist.tracking.metric_names import RESPONSE_LENGTH, REWARD, validation_metrics

Row = Mapping[str, float]


def one(name: str) -> Callable[[Row], Row]:
    """Selects the metric of this name from a row."""
    return lambda row: {name: row[name]} if name in row else {}


PANELS = {
    "validation accuracy": validation_metrics,
    "training reward": one(REWARD),
    "response length (tokens)": one(RESPONSE_LENGTH),
}


def main(argv: list[str]) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", type=Path)
    parser.add_argument("--metric", action="append", default=[], help="a metric, in place of the three")
    options = parser.parse_args(argv)
    panels = {name: one(name) for name in options.metric} or PANELS
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.4), constrained_layout=True, squeeze=False)
    for run_dir in options.run_dirs:
        rows = read_metrics(run_dir / "metrics.jsonl")
        for axis, (title, select) in zip(axes[0], panels.items(), strict=True):
            points = [(row["step"], value) for row in rows for value in select(row).values()]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=run_dir.name)
            axis.set_title(title)
            axis.set_xlabel("training step")
            axis.grid(alpha=0.3)
    for axis in () if options.metric else axes[0][:2]:
        axis.set_ylim(0, 1.02)
    axes[0][0].legend()
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1:])
