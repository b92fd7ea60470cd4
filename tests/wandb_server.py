"""A W&B server on loopback that speaks as much of its protocol as wandb-core needs, and can be away for a while.

It keeps what it is sent: of each run its history by line (a line that is sent for an offset replaces what is there, as
at W&B), config, summary, files and exit code. It knows one API key.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

from tests.away_server import AwayServer

KEY = "0123456789" * 4
USER = "somebody"


@dataclass
class StoredRun:
    """What the server knows of a run."""

    project: str
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None
    starts: int = 0

    def history(self) -> list[dict[str, Any]]:
        """The rows, in order."""
        return [json.loads(line) for line in self.lines.get("wandb-history.jsonl", [])]

    def values(self, metric: str, by: str = "training/global_step") -> list[tuple[int, float]]:
        """Step and value of the rows that have the metric."""
        return [(row[by], row[metric]) for row in self.history() if metric in row]


class WandbServer(AwayServer):
    """The server, which has no run at first."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, StoredRun] = {}

    @property
    def run(self) -> StoredRun:
        """The only run."""
        (run,) = self.runs.values()
        return run

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        known = "Basic " + base64.b64encode(f"api:{KEY}".encode()).decode()
        if request.headers.get("Authorization") == known or request.command == "PUT":
            self.sent += request.path.encode() + b"\n" + body + b"\n"
            return 200, json.dumps(self._answer_to(request.path, body)).encode()
        return 401, json.dumps({"errors": [{"message": "user is not logged in"}]}).encode()

    def _answer_to(self, path: str, body: bytes) -> Any:
        parts = path.strip("/").split("/")
        if parts[0] == "graphql":
            request = json.loads(body)
            return {"data": _graphql(self, request["query"], request.get("variables") or {})}
        if parts[0] == "files":  # files/ENTITY/PROJECT/RUN/file_stream
            _store(self.runs[parts[3]], json.loads(body))
        elif parts[0] == "storage":  # storage/RUN/NAME, the addresses that CreateRunFiles has given
            self.runs[parts[1]].files[unquote(parts[2])] = body
        return {}


def _graphql(wandb: WandbServer, query: str, given: dict[str, Any]) -> dict[str, Any]:
    if "upsertBucket" in query:
        return {"upsertBucket": _upsert(wandb, given)}
    if "createRunFiles" in query:
        addresses = [
            {"name": name, "uploadUrl": f"{wandb.url}/storage/{given['run']}/{name.replace('/', '%2F')}"}
            for name in given["files"]
        ]
        return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": addresses}}
    if "missingOk" in query:  # RunResumeStatus
        found = wandb.runs.get(given["name"])
        project = {"name": given["project"], "entity": {"name": USER}}
        return {"model": None if found is None else {**project, "bucket": _resume_status(given["name"], found)}}
    if "viewer" in query:
        viewer = {"id": "u1", "entity": USER, "username": USER, "email": "", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer}
    if "serverInfo" in query:
        return {"serverInfo": {"features": []}}
    return {"entity": None}


def _upsert(wandb: WandbServer, given: dict[str, Any]) -> dict[str, Any]:
    is_new = given["name"] not in wandb.runs
    run = wandb.runs.setdefault(given["name"], StoredRun(given["project"]))
    run.name = given["displayName"] or run.name
    if given["host"]:  # the first upsert of a process
        run.starts += 1
        run.exit_code = None
    if given["config"]:
        run.config = {key: item["value"] for key, item in json.loads(given["config"]).items()}
    project = {"id": "p1", "name": run.project, "entity": {"id": "e1", "name": USER}}
    bucket = {"id": given["name"], "name": given["name"], "displayName": run.name, "description": None}
    bucket |= {"config": given["config"], "sweepName": None, "project": project}
    bucket["historyLineCount"] = len(run.lines.get("wandb-history.jsonl", []))
    return {"bucket": bucket, "inserted": is_new}


def _resume_status(run_id: str, run: StoredRun) -> dict[str, Any]:
    def tail(name: str) -> str:
        return json.dumps(run.lines.get(name, [])[-1:])

    counts = {"logLineCount": "output.log", "historyLineCount": "wandb-history.jsonl"}
    counts |= {"eventsLineCount": "wandb-events.jsonl"}
    status: dict[str, Any] = {name: len(run.lines.get(file, [])) for name, file in counts.items()}
    status |= {"id": run_id, "name": run_id, "displayName": run.name, "tags": [], "notes": None}
    status |= {"historyTail": tail("wandb-history.jsonl"), "eventsTail": tail("wandb-events.jsonl")}
    status["summaryMetrics"] = (run.lines.get("wandb-summary.json") or ["{}"])[0]
    status["config"] = json.dumps({key: {"value": value} for key, value in run.config.items()})
    status["wandbConfig"] = json.dumps({"t": run.config.get("_wandb", {}).get("t", {})})
    return status


def _store(run: StoredRun, sent: dict[str, Any]) -> None:
    for name, part in (sent.get("files") or {}).items():
        lines = run.lines.setdefault(name, [])
        lines[part["offset"] : part["offset"] + len(part["content"])] = part["content"]
    if sent.get("complete"):
        run.exit_code = sent["exitcode"]
