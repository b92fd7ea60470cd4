from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import psutil
import pytest
import wandb

from grpo_dist.errors import ConfigError
from grpo_dist.tracking.base import SAMPLES, check_trackers
from grpo_dist.tracking.wandb import choose_mode
from tests.away_server import AwayServer
from tests.chaos.driver import Fault
from tests.chaos.runs import train
from tests.messages import refuses, says
from tests.tracking.runs import SAMPLE, SCORE, Start, eighths, log, starter


@pytest.fixture(autouse=True)
def torn_down(home):
    yield
    wandb.teardown()  # the next test has other settings


def test_offline_run_needs_no_account_and_holds_the_data(tmp_path, capfd):
    with starter("wandb", tmp_path / "run")(hf_token="do-not-keep-this", seed=987654) as trackers:
        says(trackers.notes[1], "offline", "wandb sync ")
        trackers.log_samples([SAMPLE, SAMPLE | {"gts": [1, 2], "score": None, "failure": "it raised"}], 1)
        log(trackers, 1, 5)
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    wandb.teardown()  # W&B's process may still write
    content = file.read_bytes()
    assert all(part in content for part in (b"0.625", b"critic/score/mean", b"987654"))
    assert b"do-not-keep-this" not in content
    assert capfd.readouterr().out == ""
    (table,) = tmp_path.glob("run/wandb/offline-run-*/files/media/html/val/generations_*.html")
    assert "<td>[1, 2]</td><td>None</td><td>it raised</td>" in table.read_text()


def log_in(home: Path, host: str | None, key: str = "x" * 40) -> None:
    (home / ".netrc").write_text(f"machine {host} login user password {key}\n")
    (home / ".netrc").chmod(0o600)


def test_stored_login_counts_only_for_its_server(home, monkeypatch):
    log_in(home, "wandb.example.org")
    assert choose_mode() == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert choose_mode() == "online"
    monkeypatch.delenv("WANDB_BASE_URL")
    settings = home / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.org\n")
    assert choose_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert choose_mode() == "offline"
    (home / ".netrc").unlink()
    monkeypatch.delenv("WANDB_MODE")
    assert choose_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert choose_mode() == "online"


def test_a_stored_key_is_found_for_the_server_that_wandb_has_by_default(home):
    for host in (urlsplit(wandb.Settings().base_url).hostname, "api.wandb.ai"):
        log_in(home, host)
        assert choose_mode() == "online"
    log_in(home, "api.wandb.ai", "short")
    with refuses(ConfigError, "'wandb'", "wandb login --relogin"):
        choose_mode()


def test_a_mode_that_cannot_be_stops_the_run_instead_of_prompting(tmp_path, monkeypatch):
    for mode, parts in (("online", ("WANDB_MODE=online", "API key")), ("sideways", ("remove 'wandb'",))):
        monkeypatch.setenv("WANDB_MODE", mode)
        with refuses(ConfigError, "trainer.logger", "'wandb'", *parts):
            starter("wandb", tmp_path)()


@pytest.mark.parametrize(
    ("project", "variables", "named"),
    [
        ("a/b", {}, "trainer.project_name=a/b"),
        ("x" * 129, {}, "128"),
        ("sums", {"WANDB_MODE": "Offline"}, "WANDB_MODE: "),
        ("sums", {"WANDB_BASE_URL": "nonsense", "WANDB_MODE": "offline"}, "WANDB_BASE_URL: "),
        ("sums", {"WANDB_RUN_ID": "a/b"}, "Run ID"),
    ],
)
def test_what_wandb_would_refuse_later_is_found_before_the_run(project, variables, named, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with refuses(ConfigError, "trainer.logger", "'wandb'", named):
        check_trackers(["wandb"], project)


# --- online: W&B's own process, against a server that keeps what it is sent
DRIVER = """
import pathlib, sys, time
from tests.tracking.runs import log, starter
log(starter("wandb", pathlib.Path(sys.argv[1]))(), 1, 2, 3, 4)
print("logged", flush=True)
time.sleep(600)
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB__FILE_STREAM_TRANSMIT_INTERVAL", "1")  # seconds, whole ones
    with WandbServer().listening() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        wandb.teardown()  # its process and settings may be those of another server
        yield server


@pytest.fixture
def start(server: WandbServer, tmp_path: Path) -> Start:
    return starter("wandb", tmp_path / "run")


VALIDATED = "val-core/gsm8k/reward/mean@1"


def test_a_validation_that_ends_later_is_in_the_row_of_its_step(server, start):
    with start(trainer={"val_in_background": True}) as trackers:
        log(trackers, 1, 2)
        trackers.log_samples([SAMPLE], 2)
        trackers.log({VALIDATED: 0.5}, 2)
        log(trackers, 3)
    assert server.run.values(SCORE) == server.run.values(SCORE, by="_step") == eighths(1, 2, 3)
    assert [row.get(VALIDATED) for row in server.run.history()] == [None, 0.5, None]
    assert [SAMPLES in row for row in server.run.history()] == [False, True, False]
    with start(resumed_step=1, trainer={"val_in_background": True}) as trackers:
        log(trackers, 2, of=16)
        trackers.log({VALIDATED: 0.75}, 2)
        log(trackers, 3, of=16)
        trackers.log({VALIDATED: 0.25}, 3)
    assert server.run.values(SCORE)[3:] == [(2, 2 / 16), (3, 3 / 16)]
    assert server.run.values(VALIDATED) == [(2, 0.5), (2, 0.75), (3, 0.25)]
    assert [row["_step"] for row in server.run.history()] == [1, 2, 3, 4, 5]


def test_a_run_arrives_and_other_metrics_of_a_sent_step_have_a_row_of_their_own_and_a_failure_is_marked(server, start):
    with pytest.raises(ValueError, match="broken"), start(lr=0.125) as trackers:  # noqa: PT012
        says(trackers.notes[1], "W&B online", server.url)
        trackers.log_samples([SAMPLE], 0)
        log(trackers, 0, 1)
        trackers.log({VALIDATED: 0.5}, 1)
        log(trackers, 2)
        raise ValueError("broken")
    run = server.run
    assert (run.project, run.name, run.config["lr"], run.exit_code) == ("sums", "first", 0.125, 1)
    assert (run.values(SCORE), run.values(VALIDATED)) == (eighths(0, 1, 2), [(1, 0.5)])
    assert [SAMPLES in row for row in run.history()] == [True, False, False, False]
    (table,) = [name for name in run.files if name.startswith("media/html/val/generations")]
    assert b"1+1=?" in run.files[table]
    shown = run.config["_wandb"]["m"]
    axis = [metric.get("1") for metric in shown].index("training/global_step") + 1
    assert [metric["5"] for metric in shown if metric.get("2") == "*"] == [axis], "it is the x axis of all metrics"


def test_a_resumed_run_goes_on_and_what_is_done_again_is_not_refused(server, start):
    with start() as trackers:
        log(trackers, 1, 2, 3, 4, 5)
    with start(resumed_step=3) as trackers:
        log(trackers, 4, 5, 6, of=16)
    again = [(step, step / 16) for step in (4, 5, 6)]
    assert server.run.values(SCORE) == eighths(1, 2, 3, 4, 5) + again
    assert [row["_step"] for row in server.run.history()] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (server.run.starts, server.run.exit_code) == (2, 0)


@pytest.mark.deep
def test_a_server_that_goes_away_for_a_while_loses_nothing(server, start):
    with start() as trackers:
        log(trackers, 1)
        server.wait_for(lambda: server.run.values(SCORE) == eighths(1))
        server.away = True
        log(trackers, 2, 3)
        server.wait_for(lambda: server.turned_away > 0)
        trackers.log_samples([SAMPLE], 4)
        log(trackers, 4)
        server.away = False
        log(trackers, 5)
    assert server.run.values(SCORE) == eighths(1, 2, 3, 4, 5)
    assert any(name.startswith("media/html") for name in server.run.files)
    assert server.run.exit_code == 0


def test_without_a_server_at_the_start_the_run_begins_offline_and_the_next_start_sends_it(server, start, monkeypatch):
    monkeypatch.setattr("grpo_dist.tracking.wandb._INIT_TIMEOUT_S", 1.0)
    server.away = True
    check_trackers(["wandb"], "sums")
    with start() as trackers:
        says(trackers.notes[1], "W&B offline", server.url, "wandb sync ")
        log(trackers, 1, 2)
    assert server.runs == {}
    server.away = False
    with start(resumed_step=2) as trackers:
        says(trackers.notes[1], "W&B online", server.url)
        log(trackers, 3)
    assert server.run.values(SCORE) == eighths(1, 2, 3)


def test_when_wandbs_own_process_dies_the_run_goes_on_and_the_next_start_sends_the_rest(server, start, caplog):
    before = psutil.Process().children()
    with start() as trackers:
        log(trackers, 1)
        server.wait_for(lambda: server.run.values(SCORE))
        (core,) = (process for process in psutil.Process().children() if process not in before)
        core.kill()
        core.wait()
        for step in (2, 3):
            trackers.log({SCORE: step / 8}, step)
    says([record.getMessage() for record in caplog.records], "'wandb'")
    server.run.lines["wandb-history.jsonl"].clear()  # as if the summary alone had been sent before
    with start(resumed_step=3) as trackers:
        log(trackers, 4)
    assert server.run.values(SCORE) == eighths(1, 2, 3, 4)


@pytest.mark.long
def test_what_a_killed_driver_had_not_sent_comes_with_the_next_start(server, start, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB__FILE_STREAM_TRANSMIT_INTERVAL", "600")
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "run")]
    driver: Any
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        server.wait_for(lambda: server.runs)
        server.away = True  # nor does W&B's process get anything through that outlives the driver
        assert driver.stdout.readline() == "logged\n"
        driver.kill()
    assert server.run.values(SCORE) == []
    server.away = False
    monkeypatch.setenv("WANDB__FILE_STREAM_TRANSMIT_INTERVAL", "1")
    with start(resumed_step=3) as trackers:
        log(trackers, 4, 5)
    assert server.run.values(SCORE) == eighths(1, 2, 3, 4, 5)


@pytest.mark.deep
def test_without_a_server_at_the_end_the_run_ends_and_says_what_to_do(server, start, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr("grpo_dist.tracking.wandb._FINISH_TIMEOUT_S", 1.0)
    with start() as trackers:
        log(trackers, 1)
        server.wait_for(lambda: server.run.values(SCORE))
        server.away = True
        log(trackers, 2)
    (folder,) = (tmp_path / "run" / "wandb").glob("run-*")
    says([record.getMessage() for record in caplog.records], server.url, f"wandb sync --include-online {folder}")
    assert server.run.exit_code is None
    server.away = False
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", str(folder)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    assert set(server.run.values(SCORE)) == set(eighths(1, 2))


def test_what_the_server_refuses_is_no_absence(server, start, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "f" * 40)
    with refuses(ConfigError, "trainer.logger", "'wandb'", "(online)", "WANDB_MODE=offline"):
        start()


def test_no_secret_is_sent(server, start, tmp_path, monkeypatch):
    secret, hub = "do-not-send-this", "hf_" + "a" * 24
    repository = tmp_path / "code"
    repository.mkdir()
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    (repository / "reward.py").write_text("committed\n")
    remote = f"https://{secret}:x-oauth-basic@example.org/a.git"
    for command in ("init -q", f"remote add origin {remote}", "add .", "commit -qm first"):
        subprocess.run([*git, *command.split()], check=True)
    (repository / "reward.py").write_text("not committed\n")
    monkeypatch.chdir(repository)
    monkeypatch.setenv("WANDB_SAVE_CODE", "true")
    arguments = ["main", f"reward_kwargs.api_key={secret}", f"model.path={hub}", "trainer.seed=7"]
    monkeypatch.setattr(sys, "argv", arguments)
    with start(hf_token=secret, service=f"https://me:{secret}@example.org/score", lr=0.5) as trackers:
        log(trackers, 1)
    assert sys.argv == arguments
    assert all(part in server.sent for part in (b"trainer.seed=7", b"example.org/score"))
    for private in (secret, hub, KEY, "x-oauth-basic", "not committed"):
        assert private.encode() not in server.sent, private
    assert [name for name in server.run.files if name.startswith("code/") or name.endswith(".patch")] == []


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1500)
def test_one_run_over_a_restart_of_all_workers_and_a_new_start(server, tmp_path):
    faults = [Fault("actor", "updating", "SIGKILL", 2), Fault("driver", "updating", "SIGKILL", 4)]
    outcome = train(tmp_path / "main", faults, "trainer.logger=[wandb]", "trainer.total_training_steps=5")
    run = server.run
    assert (outcome.lives, len(outcome.hits), run.starts, run.exit_code) == (2, 2, 3, 0)
    assert [step for step, _ in outcome.rewards()] == [1, 2, 3, 4, 5]
    assert list(dict(run.values(SCORE)).items()) == outcome.rewards()


# --- a server that speaks as much of W&B's protocol as wandb-core needs; it knows one API key -------------------------
KEY = "0123456789" * 4
USER = "somebody"


@dataclass
class StoredRun:
    project: str
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None
    starts: int = 0

    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines.get("wandb-history.jsonl", [])]

    def values(self, metric: str, by: str = "training/global_step") -> list[tuple[int, float]]:
        return [(row[by], row[metric]) for row in self.history() if metric in row]


class WandbServer(AwayServer):
    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, StoredRun] = {}

    @property
    def run(self) -> StoredRun:
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
        storage = f"{wandb.url}/storage/{given['run']}"
        files = [{"name": name, "uploadUrl": f"{storage}/{name.replace('/', '%2F')}"} for name in given["files"]]
        return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
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
