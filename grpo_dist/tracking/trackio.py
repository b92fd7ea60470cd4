"""trackio: a run in trackio's local database, or where its environment variables say."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import trackio
import trackio.run
from trackio.sqlite_storage import SQLiteStorage

from grpo_dist.tracking.base import SAMPLES, RunInfo, Sample, Tracker, as_rows


class TrackioTracker(Tracker):
    """A trackio run, written in the background by trackio itself.

    It is in the database in `TRACKIO_DIR`, or, if `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` is set, in that Space,
    which is private if it is made now, or on that server. The run's name is `trainer.experiment_name` and some random
    characters, stored in `run_dir/trackio/run_id`: trackio continues a run by its name.
    """

    @classmethod
    def check(cls, project_name: str) -> None:
        """Check the name of the database's file."""
        SQLiteStorage.validate_project_name(project_name)

    def __init__(self, run: RunInfo) -> None:
        name = run.known_id("trackio") or f"{run.experiment_name}-{secrets.token_hex(3)}"
        with _quiet():
            self._run = trackio.init(
                run.project_name,
                name,
                config=run.config,
                resume="allow",
                private=True,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        run.store_id("trackio", name)
        remote = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        where = "TRACKIO_SPACE_ID or TRACKIO_SERVER_URL" if remote else trackio.utils.TRACKIO_DIR
        self.note = f"trackio: run {name} in {where}: trackio show --project {run.project_name}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one step."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Log a table with one row per sample."""
        rows = as_rows(samples)
        self._run.log({SAMPLES: trackio.Table(list(rows[0]), [list(row.values()) for row in rows])}, step=step)

    def close(self) -> None:
        """Write what is left, for at most 30 s."""
        with _quiet():
            trackio.finish()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep trackio from standard output, and from asking the Hugging Face Hub for the name of a token's user."""
    module: Any = trackio.run
    before = module._get_default_namespace
    module._get_default_namespace = lambda: None
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        module._get_default_namespace = before
