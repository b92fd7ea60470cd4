"""Draw a profiled step as Perfetto shows it: the driver's stages, the calls of each rank, and what became of one group.

usage: python scripts/plot_calls.py OUT.png RUN_DIR/profiles/step_N/driver.json.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Event = dict[str, Any]
MOST_LANES = 6  # of an engine


def main(argv: list[str] | None = None) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("trace", type=Path)
    options = parser.parse_args(argv)
    with gzip.open(options.trace, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    heights = rows(events)
    figure, axis = plt.subplots(figsize=(11, 1 + 0.28 * len(heights)), constrained_layout=True)
    draw_slices(axis, events, heights)
    draw_arrows(axis, events, heights)
    axis.set_yticks([-height for height, _ in heights.values()], [name for _, name in heights.values()], fontsize=8)
    axis.legend(ncols=6, fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axis.set_xlabel("milliseconds since the step began")
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(options.out, dpi=110)


def rows(events: list[Event]) -> dict[tuple[int, int], tuple[int, str]]:
    """Height and name of each track, from top to bottom; of an engine's lanes the first ones."""
    roles = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    lanes: dict[int, int] = defaultdict(int)
    found: dict[tuple[int, int], tuple[int, str]] = {}
    for event in (each for each in events if each["name"] == "thread_name"):
        lanes[event["pid"]] += 1
        if lanes[event["pid"]] <= MOST_LANES:
            found[event["pid"], event["tid"]] = len(found), f"{roles[event['pid']]}, {event['args']['name']}"
    return found


def draw_slices(axis: Any, events: list[Event], heights: dict[tuple[int, int], tuple[int, str]]) -> None:
    """A bar for each slice, with its name where there is room; those of the whole step come first."""
    slices = [each for each in events if each["ph"] == "X" and (each["pid"], each["tid"]) in heights]
    longest = max(each["dur"] for each in slices)
    colours = dict.fromkeys(each["name"] for each in slices if not each["name"].startswith("step "))
    colours |= {name: plt.get_cmap("tab20")(index % 20) for index, name in enumerate(colours)}
    for each in (each for each in slices if each["name"] in colours):
        height, _ = heights[each["pid"], each["tid"]]
        start, length = each["ts"] / 1000, each["dur"] / 1000
        look = {"height": 0.8, "color": colours[each["name"]], "edgecolor": "white", "linewidth": 0.5}
        is_new = each["name"] not in axis.get_legend_handles_labels()[1]
        axis.barh(-height, length, left=start, label=each["name"] if is_new else None, **look)
        if each["dur"] > 0.011 * longest * len(each["name"]):
            axis.text(start + length / 2, -height, each["name"], ha="center", va="center", fontsize=7)


def draw_arrows(axis: Any, events: list[Event], heights: dict[tuple[int, int], tuple[int, str]]) -> None:
    """The arrows of the group that has most of them in the tracks that are shown; of those the one generated last."""
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    by_group: dict[str, list[tuple[Event, Event]]] = defaultdict(list)
    for start in (each for each in events if each["ph"] == "s"):
        pair = start, ends[start["id"]]
        if all((each["pid"], each["tid"]) in heights for each in pair):
            by_group[start["name"].partition(" to ")[0]].append(pair)
    if not by_group:
        return
    for start, end in max(by_group.values(), key=lambda pairs: (len(pairs), pairs[0][0]["ts"])):
        places = [(each["ts"] / 1000, -heights[each["pid"], each["tid"]][0]) for each in (end, start)]
        axis.annotate("", *places, arrowprops={"arrowstyle": "->", "color": "black", "linewidth": 0.9})


if __name__ == "__main__":
    main()
