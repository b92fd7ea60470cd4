"""MLflow, read back by its own client: in a folder, and on a server that may be away."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos import service_pb2 as protos
from mlflow.store.tracking.file_store import FileStore
from mlflow.utils.proto_json_utils import message_to_json, parse_dict

from grpo_dist.errors import ConfigError, Interrupted
from grpo_dist.tracking import base, mlflow
from grpo_dist.tracking.base import check_trackers
from tests.away_server import AwayServer
from tests.messages import refuses, says
from tests.tracking.runs import SAMPLE, SCORE, Start, eighths, log, no_network, starter


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return starter("mlflow", tmp_path / "run")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    with MlflowServer(tmp_path / "server").listening() as server:
        backoff = {"HTTP_REQUEST_BACKOFF_FACTOR": "0", "HTTP_REQUEST_BACKOFF_JITTER": "0.1"}
        for name, value in (backoff | {"TRACKING_URI": server.url, "TRACKING_TOKEN": TOKEN}).items():
            monkeypatch.setenv(f"MLFLOW_{name}", value)
        yield server


class Stored:
    def __init__(self, uri: str) -> None:
        self.client = mlflow.MlflowClient(uri)
        self.experiment = self.client.get_experiment_by_name("sums")
        assert self.experiment is not None
        (self.run,) = self.client.search_runs([self.experiment.experiment_id])

    def values(self, name: str) -> list[tuple[int, float]]:
        return [(m.step, m.value) for m in self.client.get_metric_history(self.run.info.run_id, name)]


def in_folder(tmp_path: Path) -> Stored:
    return Stored((tmp_path / "run/mlflow/mlruns").as_uri())


def test_without_a_server_it_is_in_the_run_directory(tmp_path, start, monkeypatch, capfd):
    tried = no_network(monkeypatch)
    check_trackers(["mlflow"], "sums")
    with start(actor={"lr": 0.125, "names": ["a", None]}, hf_token="do-not-keep-this", long="x" * 7000) as trackers:
        says(trackers.notes[1], f"{tmp_path}/run/mlflow/mlruns")
        log(trackers, 1)
        trackers.log({SCORE: 2 / 8, "n": math.nan, "i": math.inf, "val-core//a b/ü/acc/best@4": 0.5}, 2)
    stored = in_folder(tmp_path)
    assert (stored.run.info.run_name, stored.run.info.status) == ("first", "FINISHED")
    assert stored.values(SCORE) == eighths(1, 2)
    assert stored.values("training/global_step") == [(1, 1), (2, 2)]
    assert stored.values("val-core/a b/ü/acc/best_at_4") == [(2, 0.5)]
    assert math.isnan(stored.values("n")[0][1])
    assert stored.values("i") == [(2, math.inf)]
    expected = {"actor.lr": "0.125", "actor.names": '["a", null]', "hf_token": "***", "long": "x" * 6000}
    assert stored.run.data.params == expected
    config = json.loads(Path(stored.client.download_artifacts(stored.run.info.run_id, "config.json")).read_text())
    assert config == {"actor": {"lr": 0.125, "names": ["a", None]}, "hf_token": "***", "long": "x" * 7000}
    assert (tried, capfd.readouterr().out) == ([], "")


AWKWARD = ["e/a", "e/a/b", "x@y", "x_at_y", "x_at_y/z", "..", "ü" * 300, "ü" * 301, "last"]


def test_names_that_meet_in_the_folder_lose_nothing(tmp_path, start):
    """Also if a resumed run logs them again, or another one fewer of them. The config's keys are names too."""
    config = {"reward_kwargs": {"a": 1, "a/b": 2, "x@y": 3, "x_at_y": 4}}
    awkward = {name: float(i) for i, name in enumerate(AWKWARD)}
    with start(lr=0.5, **config) as trackers:
        trackers.log(awkward, 1)
    with start(resumed_step=1, lr=0.25, seed=1, **config) as trackers:  # what has changed stays as it was
        trackers.log(awkward, 2)
    with start(resumed_step=2, **config) as trackers:
        trackers.log({"e/a/b": 1.0, "e": 9.0}, 3)
        assert len(trackers.notes) == 2, "none was dropped"
    stored = in_folder(tmp_path)
    last = {name: [value for _, value in stored.values(name)] for name in stored.run.data.metrics}
    del last["training/global_step"]
    assert sorted(last.values()) == [[0, 0], [1, 1, 1], *([i, i] for i in range(2, 9)), [9]]
    some = {"e/a": [0, 0], "e_2/a/b": [1, 1, 1], "e_3": [9], "x_at_y_2": [3, 3], "x_at_y_3/z": [4, 4]}
    assert some.items() <= last.items()
    expected = {"reward_kwargs.a": "1", "reward_kwargs.a_2/b": "2", "reward_kwargs.x_at_y": "3"}
    assert stored.run.data.params == expected | {"reward_kwargs.x_at_y_2": "4", "lr": "0.5", "seed": "1"}


def test_samples_are_one_table(tmp_path, start, monkeypatch, capfd):
    with start() as trackers:
        trackers.log_samples([SAMPLE], 0)
        log(trackers, 0)
        trackers.log_samples([SAMPLE | {"step": 5, "gts": [1, 2], "score": None, "failure": "it raised"}], 5)
        log(trackers, 5)
    assert capfd.readouterr() == ("", "")
    stored = in_folder(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "run/mlflow/mlruns").as_uri())  # load_table asks it alone
    table = stored.client.load_table(stored.experiment.experiment_id, "val/generations.json")
    columns = [table[name].astype(str).tolist() for name in ("step", "output", "gts")]
    assert columns == [["0", "5"], ["#### 2", "#### 2"], ["2", "[1, 2]"]]
    assert table["failure"].tolist()[1] == "it raised"
    assert [math.isnan(score) for score in table["score"]] == [False, True]


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED"), (Interrupted, "KILLED")]
)
def test_the_run_ends_as_it_did(tmp_path, start, error, status):
    with pytest.raises(error), start() as trackers:  # noqa: PT012
        log(trackers, 1)
        raise error
    assert in_folder(tmp_path).run.info.status == status
    trackers = start(resumed_step=1)
    assert in_folder(tmp_path).run.info.status == "RUNNING"
    trackers.close()


def test_a_server_that_does_not_know_the_run_gets_a_new_one(server, start, tmp_path):
    with start() as trackers:
        log(trackers, 1)
    (tmp_path / "run/mlflow/run_id").write_text("0123456789abcdef0123456789abcdef\n")
    client = server.stored.client
    with start(resumed_step=1) as trackers:
        log(trackers, 2)
    one, two = client.search_runs(["0", client.get_experiment_by_name("sums").experiment_id])
    assert {one.info.run_id, two.info.run_id} > {(tmp_path / "run/mlflow/run_id").read_text().strip()}
    (new,) = (run for run in (one, two) if run.data.metrics[SCORE] == 2 / 8)
    assert [m.step for m in client.get_metric_history(new.info.run_id, SCORE)] == [2]


def test_with_a_server_that_is_away_at_the_start_the_run_is_in_its_directory(server, start, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    server.away = True
    with start(lr=0.5) as trackers:
        says(trackers.notes[1], server.url, f"{tmp_path}/run/mlflow/mlruns")
        log(trackers, 1, 2)
    stored = in_folder(tmp_path)
    assert (stored.values(SCORE), stored.run.data.params) == (eighths(1, 2), {"lr": "0.5"})
    server.away = False
    with start(resumed_step=2) as trackers:
        log(trackers, 3)
    assert server.stored.values(SCORE) == eighths(3), "a run that the server does not know is a new one there"


def test_one_that_goes_away_is_waited_for_and_training_is_not_and_no_secret_is_sent(server, start):
    with start(service="https://me:do-not-send@example.org/score", hf_token="do-not-send") as trackers:
        log(trackers, 1)
        server.wait_for(lambda: server.stored.values(SCORE), 30)
        server.away = True
        log(trackers, 2, 3)
        server.wait_for(lambda: server.turned_away > 1, 30)
        server.away = False
        log(trackers, 4)
    assert server.stored.values(SCORE) == eighths(1, 2, 3, 4)
    assert b"https://***@example.org/score" in server.sent
    assert b"do-not-send" not in server.sent


def test_without_a_server_at_the_end_the_run_ends_and_says_so(server, start, monkeypatch, caplog):
    monkeypatch.setattr(mlflow, "_FINISH_TIMEOUT_S", 0.1)
    with start() as trackers:
        server.away = True
        log(trackers, 1)
    says([record.getMessage() for record in caplog.records], "MLflow", server.url, "metrics.jsonl")


def test_what_the_folder_does_not_take_is_named_at_the_end(start, tmp_path, caplog):
    with start() as trackers:
        folder = in_folder(tmp_path).run.info.artifact_uri.removeprefix("file://").replace("artifacts", "metrics/taken")
        Path(folder).mkdir(parents=True)
        trackers.log({"taken": 1.0}, 1)
    says([record.getMessage() for record in caplog.records], "MLflow", folder, "metrics.jsonl")


def test_a_server_that_refuses_stops_the_run_and_one_that_refuses_later_does_not(server, start, monkeypatch, caplog):
    with start() as trackers:
        log(trackers, 1)
        server.wait_for(lambda: server.stored.values(SCORE), 30)
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "another")
        log(trackers, 2)
    says([record.getMessage() for record in caplog.records], "'mlflow'", "UNAUTHENTICATED")
    with refuses(ConfigError, "trainer.logger", "'mlflow'", "UNAUTHENTICATED", "remove 'mlflow'"):
        start()


def test_a_uri_that_the_client_cannot_use(start, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "gopher://me:secret@host/x")
    with refuses(ConfigError, "trainer.logger", "'mlflow'", "gopher://***@host/x") as caught:
        start()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_missing_package_names_the_command(name, monkeypatch):
    monkeypatch.setitem(base.TRACKERS, name, "no_such_package_here:Tracker")
    with refuses(ConfigError, "trainer.logger", f"'{name}'", f"pip install 'grpo_dist[{name}]'"):
        check_trackers([name], "sums")


# --- MLflow's file store behind its REST protocol, as much of it as the tracker needs; it knows one token -------------
TOKEN = "a-token-of-the-tests"


def _experiment(store: FileStore, asked: Any) -> Any:
    found = store.get_experiment_by_name(asked.experiment_name)
    if found is None:
        raise MlflowException("no such experiment", error_code=protos.databricks__pb2.RESOURCE_DOES_NOT_EXIST)
    return {"experiment": found.to_proto()}


def _create_run(store: FileStore, asked: Any) -> Any:
    run = store.create_run(asked.experiment_id, asked.user_id, asked.start_time, [], asked.run_name)
    return {"run": run.to_proto()}


def _update_run(store: FileStore, asked: Any) -> Any:
    end, status = asked.end_time or None, RunStatus.from_string(protos.RunStatus.Name(asked.status))
    return {"run_info": store.update_run_info(asked.run_id, status, end, asked.run_name or None).to_proto()}


def _log_batch(store: FileStore, asked: Any) -> Any:
    metrics = [Metric.from_proto(metric) for metric in asked.metrics]
    store.log_batch(asked.run_id, metrics, [Param.from_proto(param) for param in asked.params], [])


def _history(store: FileStore, asked: Any) -> Any:
    return {"metrics": [each.to_proto() for each in store.get_metric_history(asked.run_id, asked.metric_key)]}


CALLS: dict[str, tuple[Any, Callable[[FileStore, Any], Any]]] = {
    "experiments/search": (protos.SearchExperiments, lambda store, asked: None),
    "experiments/get-by-name": (protos.GetExperimentByName, _experiment),
    "experiments/create": (
        protos.CreateExperiment, lambda store, asked: {"experiment_id": store.create_experiment(asked.name)}
    ),
    "runs/create": (protos.CreateRun, _create_run),
    "runs/get": (protos.GetRun, lambda store, asked: {"run": store.get_run(asked.run_id).to_proto()}),
    "runs/update": (protos.UpdateRun, _update_run),
    "runs/log-batch": (protos.LogBatch, _log_batch),
    "runs/set-tag": (
        protos.SetTag, lambda store, asked: store.set_tag(asked.run_id, RunTag(asked.key, asked.value))
    ),
    "metrics/get-history": (protos.GetMetricHistory, _history),
}  # fmt: skip


class MlflowServer(AwayServer):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.store = FileStore(str(folder))

    @property
    def stored(self) -> Stored:
        return Stored(self.store.root_directory)

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        self.sent += body
        if request.headers["Authorization"] != f"Bearer {TOKEN}":
            return 401, b'{"error_code": "UNAUTHENTICATED", "message": "who are you?"}'
        address = urlsplit(request.path)
        kind, call = CALLS[address.path.removeprefix("/api/2.0/mlflow/")]
        asked = kind()
        parse_dict(json.loads(body) if body else dict(parse_qsl(address.query)), asked)
        try:
            return 200, message_to_json(kind.Response(**(call(self.store, asked) or {}))).encode()
        except MlflowException as error:
            return error.get_http_status_code(), error.serialize_as_json().encode()
