"""Event files in `run_dir/tensorboard`, written with tensorboard's own protos: needs neither torch nor TensorFlow."""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from grpo_dist.terminal import as_typed
from grpo_dist.tracking.base import SAMPLES, RunInfo, Sample, Tracker, as_markdown

_FILE_VERSION = "brain.Event:2"  # from version 2 on, readers honour the START record below


class TensorBoardTracker(Tracker):
    """Writes each metric as a scalar of its step, flushed once per step.

    A START record with the first step of this process makes TensorBoard hide that step and later ones of earlier
    processes: the steps after the checkpoint that the run resumed from, or all steps of an older run in the folder.
    """

    # Not tensorboard's EventFileWriter: it imports TensorFlow where that is installed, and its writer thread
    # can block `flush` for ever when the disk is full.
    def __init__(self, run: RunInfo) -> None:
        folder = run.folder("tensorboard")
        # Readers sort the files by name, so nanoseconds keep two starts of one process in order.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("xb"))
        self._write(file_version=_FILE_VERSION)
        first_step = 0 if run.resumed_step is None else run.resumed_step + 1
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))
        self._writer.flush()
        self.note = f"curves: {as_typed('tensorboard')} --logdir {shlex.quote(str(folder))}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one event with one scalar per metric."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=Summary(value=values))
        self._writer.flush()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Write each sample as Markdown under the Text tab."""
        for number, sample in enumerate(samples):
            self._write(step=step, summary=text_pb(f"{SAMPLES}/{number}", as_markdown(sample)))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write(Event(wall_time=time.time(), **fields).SerializeToString())
