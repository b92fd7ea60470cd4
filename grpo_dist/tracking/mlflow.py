"""MLflow: a run on a tracking server, or in a folder of the run directory."""

from __future__ import annotations

import logging
import os
import posixpath
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

# MLflow reads these when it is imported, or asked; what a user has set stays.
os.environ |= {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5",  # with 0, 4, 8, 16 and 32 s between them
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
} | os.environ

import pandas as pd  # MLflow's tables need it, and its client does not bring it
import requests
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from grpo_dist.config.keys import as_text, flatten
from grpo_dist.errors import in_a_line
from grpo_dist.redact import redact_text
from grpo_dist.tracking.base import SAMPLES, RunInfo, Sample, Tracker, as_rows
from grpo_dist.tracking.metric_names import GLOBAL_STEP, DistinctNames

_FINISH_TIMEOUT_S = 30.0  # after SIGTERM it is part of the scheduler's grace period
_LONGEST_NAME, _LONGEST_VALUE = 240, 6000  # MLflow's limits, of a name in bytes and less a number

logger = logging.getLogger(__name__)


class MlflowTracker(Tracker):
    """An MLflow run, sent by a thread of its own, in which MLflow retries its calls.

    It is on the server of `MLFLOW_TRACKING_URI`, or in that folder; without one, or if the server does not answer when
    the run starts, in `run_dir/mlflow/mlruns`. The run's id in `run_dir/mlflow/run_id` has a resumed run continue it.
    """

    def __init__(self, run: RunInfo) -> None:
        own = (run.folder("mlflow") / "mlruns").as_uri()
        uri, away = os.environ.get("MLFLOW_TRACKING_URI") or own, ""
        self._client = MlflowClient(uri)
        try:
            self._id = self._open(run)
        except MlflowException as error:
            if uri == own or not _is_absence(error):
                raise
            away = f" ({redact_text(uri)} does not answer)"
            uri, self._client = own, MlflowClient(own)
            self._id = self._open(run)
        run.store_id("mlflow", self._id)
        self._uri = redact_text(uri)
        self.note = f"MLflow: {self._uri}{away}"
        self._refusal: Exception | None = None
        self._lost: Exception | None = None
        self._names = DistinctNames(_name)
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()
        self._send(lambda: self._describe(run.config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one step."""
        now = int(time.time() * 1000)
        values = {**metrics, GLOBAL_STEP: step}

        def send() -> None:
            batch = [Metric(self._names[name], value, now, step) for name, value in values.items()]
            self._client.log_batch(self._id, metrics=batch, synchronous=True)

        self._send(send)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Append one row per sample to the run's table."""
        table = pd.DataFrame(as_rows(samples), dtype=object)
        self._send(lambda: self._client.log_table(self._id, table, f"{SAMPLES}.json"))

    def close(self) -> None:
        """Finish the MLflow run; if an exception is being handled, as failed, or killed where it is an interrupt."""
        kind = sys.exc_info()[0]
        status = "FINISHED" if kind is None else "KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED"
        self._calls.put(lambda: self._client.set_terminated(self._id, status))
        self._calls.put(None)
        self._thread.join(_FINISH_TIMEOUT_S)
        if self._lost is not None or self._thread.is_alive():
            why = f" ({redact_text(in_a_line(self._lost))})" if self._lost is not None else ""
            logger.warning("MLflow: %s has not taken all metrics%s; metrics.jsonl has them", self._uri, why)
        if self._refusal is not None:
            raise self._refusal

    def _send(self, call: Callable[[], object]) -> None:
        """Have a call made after those before it; raises the error with which the server has refused an earlier one."""
        if self._refusal is not None:
            raise self._refusal
        self._calls.put(call)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - told by the next `_send`, or at the end
                if _is_absence(error):
                    self._lost = error
                else:
                    self._refusal = error

    def _open(self, run: RunInfo) -> str:
        """Continue the run, or make one, also where the server does not know the run any more; returns its id."""
        if known_id := run.known_id("mlflow"):
            try:
                self._client.update_run(known_id, status="RUNNING")
                return known_id
            except MlflowException as error:
                if error.get_http_status_code() != 404:
                    raise
        experiment = self._client.get_experiment_by_name(run.project_name)
        place = self._client.create_experiment(run.project_name) if experiment is None else experiment.experiment_id
        return self._client.create_run(place, run_name=run.experiment_name).info.run_id

    def _describe(self, config: Mapping[str, Any]) -> None:
        """Log the config: whole as a file, and key by key as parameters, which MLflow never changes."""
        self._client.log_dict(self._id, dict(config), "config.json")
        stored = self._client.get_run(self._id).data
        self._names, names = DistinctNames(_name, stored.metrics), DistinctNames(_name, stored.params)
        values = {names[key]: as_text(value)[:_LONGEST_VALUE] for key, value in flatten(config)}
        new = [Param(key, value) for key, value in values.items() if key not in stored.params]
        self._client.log_batch(self._id, params=new, synchronous=True)


def _name(name: str) -> str:
    """Return the name without what MLflow takes in no name of a metric or parameter; `@` becomes `_at_`, as in verl."""
    plain = re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_"))
    cut = posixpath.normpath(plain).lstrip("/.").encode()[:_LONGEST_NAME].decode(errors="ignore")
    return cut.rstrip("/") or "_"


def _is_absence(error: Exception) -> bool:
    """Return True for an error which says that the server does not answer, or only with errors of its own."""
    if isinstance(error, requests.RequestException):  # of a table's upload
        return error.response is None or error.response.status_code >= 500
    if isinstance(error, MlflowException):
        return error.get_http_status_code() in (429, 500, 502, 503, 504)
    return False
