"""An MLflow tracking server on loopback that can be away for a while: MLflow's file store behind its REST protocol, as
much of it as the tracker needs. It knows one token. Artifacts are in its folder, where the client writes them itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos import service_pb2 as protos
from mlflow.store.tracking.file_store import FileStore
from mlflow.utils.proto_json_utils import message_to_json, parse_dict

from tests.away_server import AwayServer

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


class MlflowServer(AwayServer):
    """The server."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.store = FileStore(str(folder))

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        self.sent += body
        if request.headers["Authorization"] != f"Bearer {TOKEN}":
            return 401, b'{"error_code": "UNAUTHENTICATED", "message": "who are you?"}'
        address = urlsplit(request.path)
        kind, call = CALLS[address.path.removeprefix("/api/2.0/mlflow/")]
        asked = kind()
        parse_dict(json.loads(body) if body else dict(parse_qsl(address.query)), asked)
        try:
            return 200, message_to_json(call(self.store, asked)).encode()
        except MlflowException as error:
            return error.get_http_status_code(), error.serialize_as_json().encode()
