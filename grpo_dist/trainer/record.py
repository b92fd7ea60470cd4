"""What a run shows and writes down: messages, the display, trackers, the run directory and its config."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import re
import socket
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from grpo_dist.config.environment import recorded
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.errors import ConfigError, DiskError
from grpo_dist.terminal import show
from grpo_dist.tracking.base import RunInfo, Tracker, Trackers, build_trackers, restore_tracker_ids
from grpo_dist.tracking.metric_names import GLOBAL_STEP, DistinctNames
from grpo_dist.tracking.summary import Progress
from grpo_dist.trainer.checkpoint.config_changes import read_config, saved_config, told

if TYPE_CHECKING:
    from grpo_dist.trainer.checkpoint.saver import Resumed


RESOLVED_CONFIG = "config.yaml"
EXPORTED = "huggingface"  # the folder of the trained model


def say(config: JobConfig, text: str) -> None:
    """Show a message before and after there is a display."""
    if config.trainer.console:
        show(text + "\n", sys.stderr)


def make_run_dir(config: JobConfig) -> Path:
    """Make the folder of the record; returns its absolute path."""
    run_dir = config.trainer.record_dir.absolute()
    with writing_into(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def write_config(config: JobConfig, run_dir: Path) -> None:
    """Write the resolved config, without secrets, into the run directory.

    No other start of a run writes the same file, so its digest says which one has exported a model.
    """
    temporary = run_dir / f"{RESOLVED_CONFIG}.tmp"
    with writing_into(run_dir):
        text = f"# start {uuid.uuid4().hex} of this run\n{saved_config(config)}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(run_dir / RESOLVED_CONFIG)


def open_record(
    config: JobConfig, run_dir: Path, resumed: Resumed | None, steps: int, stack: ExitStack
) -> tuple[Progress, Trackers]:
    """The display and the trackers of this run, or those of the run that it resumes; closed with `stack`."""
    first = resumed.state.step if resumed is not None else 0
    stream = sys.stderr if config.trainer.console else None
    progress = stack.enter_context(Progress(steps, first, stream))
    resumed_step = None
    if resumed is not None:
        name = config.trainer.experiment_name  # under another one it is another run for the trackers, too
        if resumed.state.trackers and read_config(resumed.folder)["trainer"]["experiment_name"] == name:
            restore_tracker_ids(Path(config.trainer.default_local_dir), resumed.state.trackers)
        resumed_step = None if config.trainer.val_only else resumed.state.step
    run = RunInfo(
        run_dir=run_dir,
        project_name=config.trainer.project_name,
        experiment_name=config.trainer.experiment_name,
        config=recorded(config, config.model_dump(mode="json")),
        resumed_step=resumed_step,
    )
    trackers = stack.enter_context(build_trackers(config.trainer.logger, run))
    for note in [*_resume_notes(config, resumed, steps), *trackers.notes]:
        progress.message(note)
    return progress, trackers


def _resume_notes(config: JobConfig, resumed: Resumed | None, steps: int) -> list[str]:
    if resumed is None:
        return []
    notes = [f"resumed from {resumed.folder}", *told(resumed.changes)]
    if resumed.state.step >= steps and not config.trainer.val_only:
        exported = "; the model is exported" if config.trainer.export_hf_model else ""
        notes.append(
            f"nothing to train: it is at step {resumed.state.step} of {steps}{exported}. For more, raise "
            "trainer.total_training_steps; for a new run, set trainer.experiment_name or resume_mode=disable"
        )
    return notes


logger = logging.getLogger(__name__)

FILE_NAME = "run.lock"
# What no config mends, and may be over when the same command is run again.
_OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE})


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Lock the run directory, which must exist. The kernel releases the lock when the process ends for any reason.

    The lock is made with `flock`. It works across machines if the file system supports that (NFS from version 4, Lustre
    with `flock`). If the file system has no locks, the run continues with a warning.

    Raises:
        ConfigError: another run has the lock, or the lock file cannot be written.
    """
    with writing_into(run_dir):
        file = os.fdopen(os.open(run_dir / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8")
    with file:
        _lock(file, run_dir)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def check_run_dir(run_dir: Path) -> None:
    """Check that a run could use the folder, without creating it.

    Raises:
        ConfigError: another run has the lock, or the folder cannot be written.
    """
    with writing_into(run_dir):
        existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(f"{existing} is not writable by you")
        if run_dir not in (existing, *existing.parents) and existing.parts[1:2] in (("proc",), ("sys",)):
            raise PermissionError(f"{existing} is the kernel's: no folder can be made in it")
        file = (run_dir / FILE_NAME).open("r+", encoding="utf-8") if (run_dir / FILE_NAME).exists() else None
    if file is not None:
        with file:
            _lock(file, run_dir)


def _lock(file: TextIO, run_dir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"trainer.default_local_dir={run_dir}: another run is using it ({file.read().strip()}). Wait for "
            "it to end or stop it, or set another trainer.experiment_name or trainer.default_local_dir"
        ) from None
    except OSError as error:
        logger.warning(
            "%s: the file system has no locks (%s): make sure that no other run uses the folder", run_dir, error
        )


@contextlib.contextmanager
def writing_into(run_dir: Path) -> Iterator[None]:
    """Turn an OSError within the block into an error about the run directory.

    Raises:
        DiskError: a file could not be written, since the disk is full or has failed.
        ConfigError: for another reason.
    """
    try:
        yield
    except OSError as error:
        kind = DiskError if error.errno in _OF_THE_DISK else ConfigError
        raise kind(f"trainer.default_local_dir={run_dir}: cannot be written: {error}") from error


_REFRESH_S = 1.0  # Ray's own shortest interval: it forgets a gauge that has not been set for two of them


class PrometheusTracker(Tracker):
    """Sets a gauge of Ray for each metric, with the last value that was measured.

    Ray exports `critic/score/mean` as `ray_grpo_dist_critic_score_mean`, with the labels `project` and `experiment`. A
    value that is not finite is not exported.
    """

    def __init__(self, run: RunInfo) -> None:
        import ray  # not before `runtime.cluster.prepare` has set what Ray reads when it is imported

        here = ray.get_runtime_context().get_node_id()
        (node,) = (node for node in ray.nodes() if node["NodeID"] == here)
        if node["MetricsExportPort"] <= 0:
            raise ConfigError(
                "trainer.logger: 'prometheus': Ray exports no metrics of this node (its agent is off); start Ray with "
                "`ray start --metrics-export-port=PORT`, or remove 'prometheus' from trainer.logger"
            )
        address = f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
        self.note = f"Prometheus: http://{address}/metrics has ray_grpo_dist_*"
        self._labels = {"project": run.project_name, "experiment": run.experiment_name}
        self._gauges: dict[str, Any] = {}
        self._names = DistinctNames(gauge_name)
        self._shown: dict[str, float] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._refresh, name="prometheus", daemon=True).start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Export the values from now on; those of metrics that this step does not have stay."""
        from ray.util.metrics import Gauge

        values = self._shown | dict(metrics) | {GLOBAL_STEP: step}
        shown = {name: value for name, value in values.items() if math.isfinite(value)}
        for name in [each for each in shown if each not in self._gauges]:
            gauge = Gauge(self._names[name], description=ascii(name)[1:-1], tag_keys=tuple(self._labels))
            self._gauges[name] = gauge.set_default_tags(self._labels)
        self._shown = shown  # in one assignment, since the other thread reads it

    def close(self) -> None:
        """Set no gauge any more: Ray forgets them after two of its intervals."""
        self._closed.set()

    def _refresh(self) -> None:
        while not self._closed.wait(_REFRESH_S):
            for name, value in self._shown.items():
                self._gauges[name].set(value)


def gauge_name(metric: str) -> str:
    """Return the name of a metric's gauge, in characters of Prometheus's names; Ray puts `ray_` in front."""
    return "grpo_dist_" + re.sub(r"[^a-zA-Z0-9_]+", "_", metric)
