"""The charts of the report: which metrics stand together, and the figures for Plotly.

A chart is a row of `CHARTS`. One that no run has metrics for is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from grpo_dist.config.schema_health import RULES
from grpo_dist.plan.roles import ROLES, SUPERVISED_ROLES
from grpo_dist.protocol.fields import EXTRA
from grpo_dist.report.rollouts import mismatch_by_depth
from grpo_dist.runs import Alarm, RunFolder, noting
from grpo_dist.tracking import metric_names
from grpo_dist.tracking.metric_names import IDLE

COLORS = ("#2a78d6", "#e07b39", "#3a9d6e", "#b0549c", "#8a6d3b", "#c23b4b", "#5b6ee1", "#6b7f8c")
_PHASE_COLORS = (*COLORS, "#1f9aa5", "#c9a227", "#7d8f2a", "#9b6bd1", "#d17ba8", "#44546a", "#b5651d", "#4fb08a")
# Line styles of the runs that are compared: the first one is drawn through.
_DASHES = ("solid", "dot", "dash", "dashdot")
Names = tuple[tuple[str, str], ...]
_TRAINED = tuple(row.name for row in (*ROLES.values(), *SUPERVISED_ROLES.values()) if row.trains)


@dataclass(frozen=True)
class Chart:
    """Curves over the steps.

    Attributes:
        lines: (metric, label) of each curve.
        share: whether the values are shares, drawn in percent from 0.
        all_lines: whether runs are compared by all lines; otherwise by the first that a run has.
        ticks: format of the numbers at the axis, which then begins at 0; "": Plotly's own.
        tab: of the page that shows it, "curves" or "time".
    """

    title: str
    unit: str
    lines: Names
    note: str
    share: bool = False
    all_lines: bool = False
    ticks: str = ""
    tab: str = "curves"


CHARTS = (
    Chart(
        "Reward",
        "score",
        ((metric_names.REWARD, "mean"), (f"{metric_names.SCORE}/max", "best"), (f"{metric_names.SCORE}/min", "worst")),
        "The score of the responses that train. It rises, with noise.",
    ),
    Chart("Paired reward", "score", (("paired/score", "mean"),), "Less that of the first run on the same prompts."),
    Chart("Equal responses", "share", (("paired/equal", "to the first run"),), "The same prompts.", share=True),
    Chart(
        "KL",
        "nats per token",
        (
            (metric_names.KL_LOSS, "to the reference"),
            ("actor/reward_kl_penalty", "to the reference, in the reward"),
            (metric_names.PPO_KL, "to the policy before the update"),
        ),
        "How far the policy has gone. To the reference it grows slowly.",
    ),
    Chart(
        "Entropy",
        "nats per token",
        (("actor/entropy", "policy"), ("rollout_corr/rollout_log_ppl", "surprise of the sampled tokens")),
        "Where it falls to 0 the policy has stopped exploring.",
    ),
    Chart(
        "Response length",
        "tokens",
        (
            (metric_names.RESPONSE_LENGTH, "mean"),
            ("response_length/max", "longest"),
            ("response_length/min", "shortest"),
        ),
        "Jumps to the limit or to a few tokens are a warning.",
    ),
    Chart(
        "Shares that teach nothing",
        "share",
        ((metric_names.CLIPPED, "responses cut off"), (metric_names.ZERO_VARIANCE, "groups without a difference")),
        "Responses cut off at the limit, and groups whose responses all score the same.",
        share=True,
    ),
    Chart(
        "Pools of prompts",
        "share",
        tuple((f"curriculum/{pool}", pool) for pool in ("easy", "useful", "hard", "unseen")),
        "With data.curriculum: easy and hard prompts have groups whose scores are nearly always the same.",
        share=True,
    ),
    Chart(
        "Clipped tokens",
        "share",
        (("actor/pg_clipfrac", "ratio clipped"), ("actor/pg_clipfrac_lower", "by the dual clip")),
        "Below 0.2; 0 where a batch is one optimizer step.",
        share=True,
    ),
    Chart(
        "Gradient norm",
        "",
        tuple((f"{role}/grad_norm", role) for role in _TRAINED),
        "Before clipping. It stays of one size.",
    ),
    Chart(
        "Sampler against trainer",
        "difference of probabilities",
        (("training/rollout_probs_diff_mean", "mean"), ("training/rollout_probs_diff_max", "largest")),
        "The same tokens by the engine and by the trainer: small, and not growing.",
    ),
    Chart(
        "Sampler against trainer, by cause",
        "KL, nats per token",
        tuple((f"mismatch/{cause}", cause.replace("_", " ")) for cause in ("old_weights", "routes", "filters", "rest")),
        "What each adds to rollout_corr/kl; the rest are types and kernels.",
    ),
    Chart(
        "Staleness",
        "updates",
        (("staleness/mean", "mean"), ("staleness/max", "oldest")),
        "How many updates older than the policy the weights were that sampled a token.",
    ),
    Chart("Loss", "nats", (("sft/loss", "SFT"), ("reward_model/loss", "reward model")), "It falls."),
    Chart(
        "Reward model",
        "share",
        (("reward_model/accuracy", "right judgements"),),
        "Pairs, or labels, that it judges right: from 0.5 upwards.",
        share=True,
    ),
    Chart("Learning rate", "", tuple((f"{role}/lr", role) for role in _TRAINED), "", ticks=".1e"),
    Chart(
        "Speed", "tokens per second", ((metric_names.THROUGHPUT, "all devices"),), "Prompts and responses.", tab="time"
    ),
)


def charts(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """The figures of one run, or of several to compare, the first being the one that is reported: what Plotly draws."""
    validation = dict.fromkeys(name for run in runs for name in run.validation)
    held_out = Chart(
        "Validation",
        "",
        tuple((name, name.removeprefix(metric_names.VALIDATION)) for name in validation),
        "On rows that training never sees. If it falls while the reward rises, the policy exploits the reward.",
        all_lines=True,
    )
    recorded = dict.fromkeys((name for run in runs for row in run.rows for name in row), 0.0)
    parts = Chart(
        "Reward parts",
        "score",
        tuple((f"{EXTRA}{name}/mean", name) for name in metric_names.reward_parts(recorded)),
        "Each reward function, and what they tell besides. The one that you care about should rise, not only the sum.",
        all_lines=True,
    )
    idle = Chart(
        "Idle shares",
        "share",
        tuple((name, name.removeprefix(IDLE)) for name in recorded if name.startswith(IDLE)),
        "The share of the time in which a role had nothing to do. The one near 0 is what the others wait for.",
        share=True,
        all_lines=True,
        tab="time",
    )
    charts = [*(_curves(chart, runs) for chart in (CHARTS[0], parts, held_out, *CHARTS[1:])), _by_depth(runs)]
    phases = {name for name in recorded if name.startswith(metric_names.TIMING)}
    colors = dict(zip(sorted(phases - {metric_names.STEP_TIME}), cycle(_PHASE_COLORS), strict=False))  # in all runs
    title = "Where a step's seconds go"
    charts += [_timing(run, colors, f"{title}: {run.name}" if len(runs) > 1 else title) for run in runs]
    charts.append(_curves(idle, runs))
    return [chart for chart in charts if chart["figure"]["data"]]


def _curves(chart: Chart, runs: Sequence[RunFolder]) -> dict[str, Any]:
    data = []
    for run, dash, of_run in zip(runs, cycle(_DASHES), cycle(COLORS), strict=False):
        recorded = {name for row in run.rows for name in row}
        there = [(metric, label) for metric, label in chart.lines if metric in recorded]
        lines = [(metric, label, color) for (metric, label), color in zip(there, cycle(COLORS), strict=False)]
        if len(runs) > 1 and not chart.all_lines:  # of what is compared, the line that says most
            lines = [(metric, label, of_run) for metric, label, _ in lines[:1]]
        for metric, label, color in lines:
            label = f"{label} ({run.name})" if len(runs) > 1 else label
            points = _points(run, metric)
            curve = {
                "type": "scatter",
                "mode": "lines+markers" if len(points["x"]) <= 30 else "lines",
                "name": label.replace("<", "&lt;"),  # Plotly reads some HTML in names
                "line": {"color": color, "dash": dash, "width": 2},
                "hovertemplate": "%{y:.4g}",
            }
            data.append(curve | points)
    data += _alarms(chart, runs[0])
    return _shown(chart, data)


def _by_depth(runs: Sequence[RunFolder]) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    for run, color in zip(runs, cycle(COLORS), strict=False):
        rows, step = [], max(run.rollout_steps, default=0)
        with noting([], "the chart"):  # there may be no file; damage is told where the step's responses are read
            rows = mismatch_by_depth(run.path, step)
        for name, dash, at in (("mean", "solid", 2), ("99th percentile", "dot", 3)) if rows else ():
            label = f"{name}, step {step} of {run.name}".replace("<", "&lt;")
            curve = {"type": "scatter", "mode": "lines", "name": label, "line": {"color": color, "dash": dash}}
            points = {"x": [row[0] for row in rows], "y": [_finite(row[at]) for row in rows]}
            tokens = {"text": [row[1] for row in rows], "hovertemplate": "%{y:.3g} (%{text} tokens)"}
            data.append(curve | points | tokens)
    note = "How far a token's two log-probs are apart, by the number of tokens before it. The line stays level."
    return _shown(Chart("Sampler against trainer, by depth", "nats", (), note), data)


def _shown(chart: Chart, data: list[dict[str, Any]], **layout: Any) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": chart.unit}}
    if ticks := ".0%" if chart.share else chart.ticks:
        axis |= {"rangemode": "tozero", "tickformat": ticks}
    layout = {"xaxis": {"hoverformat": "d"}, "yaxis": axis, "hovermode": "x unified"} | layout
    return {"title": chart.title, "note": chart.note, "tab": chart.tab, "figure": {"data": data, "layout": layout}}


def _alarms(chart: Chart, run: RunFolder) -> list[dict[str, Any]]:
    names = [metric for metric, _ in chart.lines]

    def metric_of(alarm: Alarm, row: Any) -> str | None:
        looked_at = (*RULES[alarm.rule].metrics, *RULES[alarm.rule].needs)
        return next((name for name in looked_at if name in names and name in row), None)

    rows = {int(row["step"]): row for row in run.rows}
    marks = [(a, metric_of(a, rows[a.step])) for a in run.alarms if a.rule in RULES]
    shown = [(alarm, rows[alarm.step][metric]) for alarm, metric in marks if metric is not None]
    if not shown:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "alarm",
            "x": [alarm.step for alarm, _ in shown],
            "y": [_finite(value) for _, value in shown],
            "text": [alarm.text.replace("&", "&amp;").replace("<", "&lt;").replace("\n", "<br>") for alarm, _ in shown],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"symbol": "triangle-up", "size": 12, "color": "#c23b4b"},
        }
    ]


def _timing(run: RunFolder, colors: Mapping[str, str], title: str) -> dict[str, Any]:
    phases: dict[str, float] = {}
    for row in run.rows:
        for name, value in row.items():
            if name in colors and math.isfinite(value):
                phases[name] = phases.get(name, 0.0) + value
    data = []
    for name in sorted(phases, key=lambda name: -phases[name]):
        label, marker = name.removeprefix(metric_names.TIMING), {"color": colors[name]}
        bars = {"type": "bar", "name": label, "marker": marker, "hovertemplate": "%{y:.2f} s"}
        data.append(bars | _points(run, name))
    note = (
        "Phases that run at the same time stand on top of each other too: a column may be higher than the step is long."
    )
    return _shown(Chart(title, "seconds", (), note, tab="time"), data, barmode="stack")


def _points(run: RunFolder, name: str) -> dict[str, list[Any]]:
    rows = [row for row in run.rows if name in row]
    return {"x": [int(row["step"]) for row in rows], "y": [_finite(row[name]) for row in rows]}


def _finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity; Plotly leaves a gap for null."""
    return value if math.isfinite(value) else None
