"""Draw the curves of one or more runs: validation accuracy, training reward and response length by step.

usage: python scripts/plot_run.py OUT.png RUN_DIR [RUN_DIR ...]
"""

from __future__ import annotations

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


def main(out: str, *run_dirs: str) -> None:
    """Write the picture."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3.4), constrained_layout=True)
    for run_dir in run_dirs:
        rows = read_metrics(Path(run_dir) / "metrics.jsonl")
        for axis, (title, select) in zip(axes, PANELS.items(), strict=True):
            points = [(row["step"], value) for row in rows for value in select(row).values()]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=Path(run_dir).name)
            axis.set_title(title)
            axis.set_xlabel("training step")
            axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 1.02)
    axes[1].set_ylim(0, 1.02)
    axes[0].legend(loc="lower right")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
