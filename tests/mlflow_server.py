"""An MLflow tracking server on loopback that can be away for a while: MLflow's file store behind its REST protocol, as
much of it as the tracker needs. It knows one token. Artifacts are in its folder, where the client writes them itself.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos import service_pb2 as protos
from mlflow.store.tracking.file_store import FileStore
from mlflow.utils.proto_json_utils import message_to_json, parse_dict

TOKEN = "a-token-of-the-tests"


def _experiment(store: FileStore, asked: Any) -> Any:
    found = store.get_experiment_by_name(asked.experiment_name)
    if found is None:
        raise MlflowException("no such experiment", error_code=protos.databricks__pb2.RESOURCE_DOES_NOT_EXIST)
    return protos.GetExperimentByName.Response(experiment=found.to_proto())


def _create_run(store: FileStore, asked: Any) -> Any:
    run = store.create_run(asked.experiment_id, asked.user_id, asked.start_time, [], asked.run_name)
    return protos.CreateRun.Response(run=run.to_proto())


def _update_run(store: FileStore, asked: Any) -> Any:
    end, status = asked.end_time or None, RunStatus.from_string(protos.RunStatus.Name(asked.status))
    info = store.update_run_info(asked.run_id, status, end, asked.run_name or None)
    return protos.UpdateRun.Response(run_info=info.to_proto())


def _log_batch(store: FileStore, asked: Any) -> Any:
    metrics = [Metric.from_proto(metric) for metric in asked.metrics]
    store.log_batch(asked.run_id, metrics, [Param.from_proto(param) for param in asked.params], [])
    return protos.LogBatch.Response()


def _set_tag(store: FileStore, asked: Any) -> Any:
    store.set_tag(asked.run_id, RunTag(asked.key, asked.value))
    return protos.SetTag.Response()


CALLS: dict[str, tuple[Any, Callable[[FileStore, Any], Any]]] = {
    "experiments/search": (protos.SearchExperiments, lambda store, asked: protos.SearchExperiments.Response()),
    "experiments/get-by-name": (protos.GetExperimentByName, _experiment),
    "experiments/create": (
        protos.CreateExperiment,
        lambda store, asked: protos.CreateExperiment.Response(experiment_id=store.create_experiment(asked.name)),
    ),
    "runs/create": (protos.CreateRun, _create_run),
    "runs/get": (
        protos.GetRun,
        lambda store, asked: protos.GetRun.Response(run=store.get_run(asked.run_id).to_proto()),
    ),
    "runs/update": (protos.UpdateRun, _update_run),
    "runs/log-batch": (protos.LogBatch, _log_batch),
    "runs/set-tag": (protos.SetTag, _set_tag),
    "metrics/get-history": (
        protos.GetMetricHistory,
        lambda store, asked: protos.GetMetricHistory.Response(
            metrics=[each.to_proto() for each in store.get_metric_history(asked.run_id, asked.metric_key)]
        ),
    ),
}


class MlflowServer:
    """The server. While `away` is set it ends every connection without an answer, and counts them."""

    def __init__(self, folder: Path) -> None:
        self.store = FileStore(str(folder))
        self.sent = b""
        self.away = False
        self.turned_away = 0
        self.changed = threading.Condition()
        self.http = _Http(("127.0.0.1", 0), _Handler)
        self.http.mlflow = self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def wait_for(self, what: Callable[[], object]) -> None:
        """Return once `what` is true, after at most 30 s."""
        with self.changed:
            assert self.changed.wait_for(what, 30)


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """A server for the time of the block."""
    server = MlflowServer(folder)
    threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.http.shutdown()
    server.http.server_close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    mlflow: MlflowServer


class _Handler(BaseHTTPRequestHandler):
    server: _Http

    def do_GET(self) -> None:
        self._answer(dict(parse_qsl(urlsplit(self.path).query)))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.mlflow.sent += body
        self._answer(json.loads(body))

    def _answer(self, given: dict[str, Any]) -> None:
        mlflow = self.server.mlflow
        with mlflow.changed:
            if mlflow.away:
                mlflow.turned_away += 1
                mlflow.changed.notify_all()
                self.close_connection = True
                return
            status, text = self._call(given)
            mlflow.changed.notify_all()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _call(self, given: dict[str, Any]) -> tuple[int, bytes]:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return 401, b'{"error_code": "UNAUTHENTICATED", "message": "who are you?"}'
        kind, call = CALLS[urlsplit(self.path).path.removeprefix("/api/2.0/mlflow/")]
        asked = kind()
        parse_dict(given, asked)
        try:
            return 200, message_to_json(call(self.server.mlflow.store, asked)).encode()
        except MlflowException as error:
            return error.get_http_status_code(), error.serialize_as_json().encode()

    def log_message(self, *_: Any) -> None:
        pass
