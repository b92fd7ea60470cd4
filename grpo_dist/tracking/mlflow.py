"""MLflow: a run on a tracking server, or in a folder of the run directory."""

from __future__ import annotations

import logging
import os
import posixpath
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# MLflow reads these when it is imported, or asked; what a user has set stays. Calls are made again by sender.py.
os.environ |= {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
} | os.environ

import pandas as pd  # MLflow's tables need it, and its client does not bring it
import requests
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from grpo_dist.config.keys import as_text, flatten
from grpo_dist.errors import ConfigError
from grpo_dist.redact import redact_text
from grpo_dist.tracking.base import RUN_IDS, RunInfo
from grpo_dist.tracking.jsonl import FILE_NAME as METRICS
from grpo_dist.tracking.jsonl import read_metrics
from grpo_dist.tracking.metric_names import GLOBAL_STEP
from grpo_dist.tracking.samples import SAMPLES, Sample, as_rows
from grpo_dist.tracking.sender import Sender

_URI = "MLFLOW_TRACKING_URI"
_CHECK_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 30.0
_FINISH_TIMEOUT_S = 30.0  # after SIGTERM it is part of the scheduler's grace period
_LONGEST_NAME, _LONGEST_VALUE = 250, 6000  # MLflow's limits

logger = logging.getLogger(__name__)


class MlflowTracker:
    """An MLflow run, sent in the background.

    It is on the server of `MLFLOW_TRACKING_URI`, or in that folder; without one, in `run_dir/mlflow/mlruns`. A server
    that is away is waited for without stopping the run, and at the end for 30 s. The run's id is stored in
    `run_dir/mlflow/run_id`, so that a resumed run continues the same MLflow run. It first sends the rows of
    metrics.jsonl that the server has not got.

    Raises:
        ConfigError: the server refuses the run.
    """

    @staticmethod
    def check() -> None:
        """Ask the server for an experiment, before the run starts; one that does not answer says nothing against it.

        Raises:
            ConfigError: the server refuses, or the URI is none of MLflow's.
        """
        uri = os.environ.get(_URI)
        if not uri:
            return
        asking = Sender(_is_absence)
        answer = asking.send(lambda: MlflowClient(uri).search_experiments(max_results=1))
        try:
            answer.result(_CHECK_TIMEOUT_S)
        except TimeoutError:
            pass
        except Exception as error:
            cause = redact_text(" ".join(str(error).split()))
            raise ConfigError(
                f"trainer.logger: 'mlflow': MLFLOW_TRACKING_URI={redact_text(uri)} cannot be used: {cause}; correct "
                "it, MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, unset it to "
                "write into the run directory, or remove 'mlflow' from trainer.logger"
            ) from error
        finally:
            asking.stop()

    def __init__(self, run: RunInfo) -> None:
        self._id_file = run.run_dir / RUN_IDS["mlflow"]
        self._id_file.parent.mkdir(exist_ok=True)
        uri = os.environ.get(_URI) or (self._id_file.parent / "mlruns").as_uri()
        self._shown_uri = redact_text(uri)
        self._sender = Sender(_is_absence)
        self._client, self._id = MlflowClient(uri), ""
        if run.resumed_step is None:
            self._id_file.unlink(missing_ok=True)  # of an earlier run; a server that is away gives the new one later
        known_id = run.known_id("mlflow")
        self.note = f"MLflow: {self._shown_uri}"
        try:
            self._sender.send(lambda: self._open(run, known_id)).result(_START_TIMEOUT_S)
        except TimeoutError:
            self.note += f" does not answer ({self._sender.absence}); metrics are kept, and sent once it does"
        except Exception:
            self._sender.stop()
            raise
        self._sender.send(lambda: self._describe(run.config))
        if (last := run.resumed_step) is not None:
            self._sender.send(lambda: self._catch_up(run.run_dir / METRICS, last))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one step."""
        batch = _batch(metrics, step)
        self._sender.send(lambda: self._client.log_batch(self._id, metrics=batch, synchronous=True))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Append one row per sample to the run's table."""
        if samples:
            table = pd.DataFrame(as_rows(samples), dtype=object)
            self._sender.send(lambda: self._client.log_table(self._id, table, f"{SAMPLES}.json"))

    def close(self) -> None:
        """Finish the MLflow run; if an exception is being handled, as failed, or killed where it is an interrupt."""
        kind = sys.exc_info()[0]
        status = "FINISHED" if kind is None else "KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED"
        try:
            ended = self._sender.send(lambda: self._client.set_terminated(self._id, status))
            ended.result(_FINISH_TIMEOUT_S)
        except TimeoutError:
            logger.warning(
                "MLflow: %s did not take the last metrics within %.0f s; the run has them in %s, and sends them if it "
                "is resumed",
                *(self._shown_uri, _FINISH_TIMEOUT_S, METRICS),
            )
        finally:
            self._sender.stop()

    def _open(self, run: RunInfo, known_id: str | None) -> None:
        """Continue the run, or make one, also where the server does not know the run any more."""
        if known_id is not None:
            try:
                self._client.update_run(known_id, status="RUNNING")
                self._id = known_id
                return
            except MlflowException as error:
                if error.get_http_status_code() != 404:
                    raise
        experiment = self._client.get_experiment_by_name(run.project_name)
        place = self._client.create_experiment(run.project_name) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(place, run_name=run.experiment_name).info.run_id
        self._id_file.write_text(self._id + "\n")

    def _describe(self, config: Mapping[str, Any]) -> None:
        """Log the config: whole as a file, and key by key as parameters, which MLflow never changes."""
        self._client.log_dict(self._id, dict(config), "config.json")
        there = self._client.get_run(self._id).data.params
        values = {_name(key): as_text(value)[:_LONGEST_VALUE] for key, value in flatten(config)}
        new = [Param(key, value) for key, value in values.items() if key not in there]
        self._client.log_batch(self._id, params=new, synchronous=True)

    def _catch_up(self, rows: Path, last: int) -> None:
        """Send the rows up to the step `last` that the server has not got; later ones are this start's own."""
        there = {metric.step for metric in self._client.get_metric_history(self._id, GLOBAL_STEP)}
        for row in read_metrics(rows):
            step = int(row.pop("step"))
            if step not in there and step <= last:
                self._client.log_batch(self._id, metrics=_batch(row, step), synchronous=True)


def _batch(metrics: Mapping[str, float], step: int) -> list[Metric]:
    now = int(time.time() * 1000)
    return [Metric(_name(name), value, now, step) for name, value in {**metrics, GLOBAL_STEP: step}.items()]


def _name(name: str) -> str:
    """The name without what MLflow takes in no name of a metric or parameter; `@` becomes `_at_`, as in verl."""
    plain = re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_"))
    return posixpath.normpath(plain).lstrip("/.")[:_LONGEST_NAME]


def _is_absence(error: Exception) -> bool:
    """Whether an error says that the server does not answer, or only with errors of its own."""
    if isinstance(error, requests.RequestException):  # of a table's upload
        return error.response is None or error.response.status_code >= 500
    if isinstance(error, MlflowException):
        return error.get_http_status_code() in (429, 500, 502, 503, 504)
    return False
