"""The report's figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from grpo_dist.config.schema_health import RULES
from grpo_dist.report.charts import CHARTS, charts
from grpo_dist.runs import read_run
from tests.report.runs import write_run

SECONDS = "Where a step's seconds go"
ROWS = [
    {
        "step": step,
        "critic/score/mean": step / 4,
        "critic/score/max": 1.0,
        "actor/kl_loss": 1.5,
        "timing_s/step": 3.0,
        "timing_s/gen": 2.0,
        "timing_s/update_actor": 1.0 + step,
        "perf/idle/actor": 0.25,
        "actor/grad_norm": math.nan if step == 2 else 1.0,
    }
    for step in range(1, 5)
]


def drawn(folder: Path, *runs: Sequence[dict[str, float]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The charts of runs a, b, ..., and their traces by title and name."""
    folders = [
        write_run(folder / name, rows, f"trainer.experiment_name={name}")
        for name, rows in zip("ab", runs, strict=False)
    ]
    found = charts([read_run(each) for each in folders])
    return found, {chart["title"]: {trace["name"]: trace for trace in chart["figure"]["data"]} for chart in found}


def test_curves_of_what_is_there(tmp_path: Path) -> None:
    found, shown = drawn(tmp_path, ROWS)
    assert shown.keys() == {"Reward", "KL", "Gradient norm", SECONDS, "Idle shares"}
    assert shown["Reward"].keys() == {"mean", "best"}
    assert (shown["Reward"]["mean"]["x"], shown["Reward"]["mean"]["y"]) == ([1, 2, 3, 4], [0.25, 0.5, 0.75, 1.0])
    assert shown["Gradient norm"]["actor"]["y"] == [1.0, None, 1.0, 1.0], "a gap where there is no number"
    assert list(shown[SECONDS]) == ["update_actor", "gen"], "the longest first, without the step itself"
    assert shown[SECONDS]["update_actor"]["y"] == [2.0, 3.0, 4.0, 5.0]
    assert shown["Idle shares"]["actor"]["y"] == [0.25] * 4
    assert {chart["title"] for chart in found if chart["tab"] == "time"} == {SECONDS, "Idle shares"}
    alarm = shown["KL"]["alarm"]
    assert (alarm["x"], alarm["y"]) == ([3], [1.5])
    assert ("<br>" in alarm["text"][0], "\n" in alarm["text"][0]) == (True, False)
    for chart in found:
        go.Figure(chart["figure"])  # which raises for what Plotly does not know


def test_parts_of_the_reward_and_a_learning_rate_that_stays(tmp_path: Path) -> None:
    more = {"reward_extra/right/mean": 0.0, "reward_extra/short/mean": -0.5, "actor/lr": 1e-4, "actor/entropy": 0.5}
    found, shown = drawn(tmp_path, [row | more for row in ROWS])
    assert shown["Reward parts"].keys() == {"right", "short"}
    assert shown["Reward parts"]["short"]["y"] == [-0.5] * 4
    (rate,) = [chart["figure"]["layout"]["yaxis"] for chart in found if chart["title"] == "Learning rate"]
    assert (rate["rangemode"], rate["tickformat"]) == ("tozero", ".1e"), "not around the value, where it looks like 0"
    assert shown["Entropy"]["policy"]["line"]["color"] == shown["Reward"]["mean"]["line"]["color"]


def test_a_phase_has_a_color_of_its_own_in_all_runs(tmp_path: Path) -> None:
    """Also where another phase takes longest, or one is missing."""
    many = {f"timing_s/{name}": 1.0 for name in "abcdefghijklmno"}
    _, shown = drawn(tmp_path / "one", [ROWS[0] | many])
    assert len({trace["marker"]["color"] for trace in shown[SECONDS].values()}) == len(shown[SECONDS]) - 1 == 16
    _, shown = drawn(
        tmp_path / "two",
        [{"step": 1, "timing_s/gen": 2.0, "timing_s/adv": 1.0}],
        [{"step": 1, "timing_s/gen": 1.0, "timing_s/z": 9.0}],
    )
    one, other = (shown[f"{SECONDS}: grpo_dist/{name}"] for name in "ab")
    assert one["gen"]["marker"] == other["gen"]["marker"] != other["z"]["marker"]


def test_runs_are_compared_by_the_line_that_says_most(tmp_path: Path) -> None:
    _, shown = drawn(tmp_path, ROWS, ROWS)
    assert shown["Reward"].keys() == {"mean (grpo_dist/a)", "mean (grpo_dist/b)"}
    styles = [(trace["line"]["color"], trace["line"]["dash"]) for trace in shown["Reward"].values()]
    assert len({color for color, _ in styles}) == len({dash for _, dash in styles}) == 2


def test_every_health_rule_of_a_metric_can_be_marked() -> None:
    metrics = {metric for chart in CHARTS for metric, _ in chart.lines}
    unseen = {name for name, rule in RULES.items() if not metrics & {*rule.metrics, *rule.needs}}
    assert unseen <= {"agreement", "reward_failures", "no_reward", "non_finite"}, "these stand in the list of alarms"
