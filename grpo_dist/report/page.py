"""Makes the report's page: one HTML file with everything in it, which needs no network."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import grpo_dist
from grpo_dist.config.schema_job import StopAtConfig
from grpo_dist.report.charts import charts
from grpo_dist.report.run_folder import RunFolder, config_table, section
from grpo_dist.tracking import metric_names
from grpo_dist.tracking.summary import format_seconds

STATIC = files("grpo_dist.report") / "static"


def overview(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """All but the responses, which the page draws, again when it changes: head, alarms, charts, config."""
    run = runs[0]
    return {
        "title": " against ".join(shown.name for shown in runs),
        "facts": facts(run),
        "problems": [problem for shown in runs for problem in shown.problems],
        "alarms": [{"step": alarm.step, "rule": alarm.rule, "text": alarm.text} for alarm in run.alarms],
        "charts": charts(runs),
        "waited": run.waited,
        "config": {
            "runs": [shown.name for shown in runs],
            "keys": [{"key": key, "values": values} for key, values in config_table(runs)],
        },
        "steps": list(run.rollout_steps),
    }


def page(runs: Sequence[RunFolder], steps: Mapping[int, Any] | None) -> str:
    """The page of a run, and of those that it is compared with, which come after it.

    Args:
        steps: responses by step (`rollouts.read_step`), which go into the page; None: the page asks the server for
            what it shows (server.py).
    """
    from plotly.offline import get_plotlyjs

    parts = {"style": _static("report.css"), "script": _static("report.js"), "plotly": get_plotlyjs()}
    if steps is None:
        blobs = ""
    else:
        shown = overview(runs) | {"steps": list(steps)}
        data = {"overview": shown} | {f"step-{number}": step for number, step in steps.items()}
        blobs = "\n".join(
            f'<script type="application/octet-stream" id="data-{name}">{_packed(value)}</script>'
            for name, value in data.items()
        )
    made = f"grpo_dist {grpo_dist.__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    template = _static("report.html")
    plain = "".join(f"<dt>{html.escape(label)}</dt><dd>{html.escape(text)}</dd>" for label, text in facts(runs[0]))
    values = {"title": html.escape(runs[0].name), "made": html.escape(made), "facts": plain, "data": blobs, **parts}
    before, *rest = template.split("{{ ")  # what is put in is never searched for places
    return before + "".join(values[name] + text for name, _, text in (part.partition(" }}") for part in rest))


def facts(run: RunFolder) -> list[tuple[str, str]]:
    """What the report says first of a run, as (label, text): its steps, time, validation and reward, first and last."""
    trained = [row for row in run.rows if metric_names.STEP_TIME in row]
    lines = [("folder", str(run.path.absolute())), ("steps", str(max((int(r["step"]) for r in run.rows), default=0)))]
    seconds = sum(row[metric_names.STEP_TIME] for row in trained)
    if trained:
        lines.append(("training time", f"{format_seconds(seconds)}, {format_seconds(seconds / len(trained))} a step"))
    stop_at = section(section(run.config, "trainer"), "stop_at")
    if stop_at and run.rows and (why := metric_names.why_it_ends(StopAtConfig.model_validate(stop_at), run.rows[-1])):
        lines.append(("ended", why))
    for name in run.validation:
        values = [row[name] for row in run.rows if name in row]
        arrow = f"{values[0]:.3g} → {values[-1]:.3g}" if len(values) > 1 else f"{values[0]:.3g}"
        lines.append((name.removeprefix(metric_names.VALIDATION), arrow))
    rewards = [row[metric_names.REWARD] for row in trained if metric_names.REWARD in row]
    if rewards:
        lines.append(("reward", f"{rewards[0]:.3g} → {rewards[-1]:.3g}"))
    model = section(section(run.config, "actor_rollout_ref") or run.config, "model")
    if model.get("path"):
        lines.append(("model", str(model["path"])))
    return lines


def _packed(value: Any) -> str:
    """JSON, compressed, in letters that mean nothing to HTML."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode()


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
