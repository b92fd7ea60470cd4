"""The report's page: one HTML file with everything in it, which needs no network, or one that asks for what is new.

The second is served on this machine while a run goes on: it asks every few seconds.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import html
import json
import secrets
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpo_dist
from grpo_dist import hosts
from grpo_dist.config.keys import flatten
from grpo_dist.config.schema_job import StopAtConfig
from grpo_dist.errors import ConfigError, GrpoDistError
from grpo_dist.report.charts import charts
from grpo_dist.report.rollouts import load_token_texts, read_step
from grpo_dist.runs import RunFolder, read_run, section
from grpo_dist.tracking import metric_names
from grpo_dist.tracking.summary import format_seconds
from grpo_dist.trainer.checkpoint.config_changes import MISSING

STATIC = files("grpo_dist.report") / "static"
LOOPBACK = "127.0.0.1"


def overview(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """All but the responses, which the page draws, again when it changes: head, alarms, charts, config."""
    run = runs[0]
    return {
        "title": " against ".join(shown.name for shown in runs),
        "facts": facts(run),
        "against": against(runs),
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


def page(runs: Sequence[RunFolder], steps: Mapping[int, Any] | None, named: Sequence[Any] = ()) -> str:
    """The page of a run, and of others beside it; with responses by step and named rows, or (None) a server to ask."""
    from plotly.offline import get_plotlyjs

    parts = {"style": _static("report.css"), "script": _static("report.js"), "plotly": get_plotlyjs()}
    blobs = ""
    if steps is not None:
        shown = overview(runs) | {"steps": list(steps), "named": list(named)}
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


def against(runs: Sequence[RunFolder]) -> list[list[str]]:
    """What separates each run from the first one, prompt by prompt: a table of a head and a line for each."""
    columns = list(dict.fromkeys(column for run in runs[1:] for column in run.against))
    lines = ([run.name, *(run.against.get(column, "") for column in columns)] for run in runs[1:])
    return [["", *columns], *lines] if columns else []


def config_table(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Return (key, its value in each run): all keys of a single run, of several those whose values differ."""
    flat = [dict(flatten(run.config)) for run in runs]
    settings = []
    for key in dict.fromkeys(key for config in flat for key in config):
        values = [str(config.get(key, MISSING)) for config in flat]
        if len(runs) == 1 or len(set(values)) > 1:
            settings.append((key, values))
    return settings


def _packed(value: Any) -> str:
    """JSON, compressed, in letters that mean nothing to HTML."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode()


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


class ReportServer(ThreadingHTTPServer):
    """Serves the report on this machine's loopback address, to those who know its address.

    `url` is the page's; it holds a token, since other users of the machine reach the port too. `folders` are the run's
    and those of what it is compared with.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int) -> None:
        self.folders = list(folders)
        self._token = secrets.token_urlsafe(24)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise ConfigError(f"--port {port}: {error}; choose another port, or 0 for a free one") from None
        self.url = f"http://{LOOPBACK}:{self.server_address[1]}/{self._token}/"

    def answer(self, path: str) -> tuple[int, str, str]:
        """(status, content type, body) for a path."""
        token, _, name = path.lstrip("/").partition("/")
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            return 403, "text/plain", "open the address that `grpo-dist report --serve` has printed"
        run_dir, (kind, _, number) = self.folders[0], name.rpartition("-")
        if name == "":
            return 200, "text/html; charset=utf-8", page([read_run(run_dir)], None)
        if name == "data/overview":
            value = overview([read_run(folder) for folder in self.folders])
        elif kind == "data/step" and number.isdecimal():
            value = read_step(run_dir, int(number), load_token_texts(run_dir))
        else:
            return 404, "text/plain", "there is nothing here"
        return 200, "application/json", json.dumps(value, ensure_ascii=False, allow_nan=False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that has been lost needs no traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def handle(self) -> None:
        limit = threading.Timer(hosts.REQUEST_S, self._close)
        limit.start()
        try:
            super().handle()
        finally:
            limit.cancel()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        try:
            known = hosts.is_this_machine(self.headers.get("Host", ""))
            status, kind, text = self.server.answer(self.path.partition("?")[0] if known else "no token")
        except GrpoDistError as error:  # such as a file that is being written
            status, kind, text = 500, "text/plain", str(error)
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not shown: their paths hold the token."""
