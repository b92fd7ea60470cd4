"""`metrics.jsonl`: the run's own record, one JSON object per step.

Always on, and the source of the summary at the end. A non-finite number is written as `null`, because JSON has neither
NaN nor infinity; `read_metrics` returns it as NaN.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_dist.errors import ConfigError
from grpo_dist.tracking.base import RunInfo
from grpo_dist.tracking.record import METRICS, drop_rollouts_after, set_aside

logger = logging.getLogger(__name__)

FILE_NAME = METRICS


class JsonlTracker:
    """Appends `{"step": n, name: number, ...}` to `run_dir/metrics.jsonl`, unbuffered.

    Resuming from a checkpoint drops the steps after it, so that every step is recorded once. A fresh start in a used
    run directory keeps the old file as `metrics.old-N.jsonl`. The same becomes of the rollouts (tracking/record.py),
    so that those in the folder are of the steps in the file.

    If a write fails (disk full), lines are kept in memory and written with the next line that succeeds.
    """

    def __init__(self, run: RunInfo) -> None:
        self.path = run.run_dir / FILE_NAME
        if run.resumed_step is None:
            set_aside(run.run_dir)
        else:
            truncate_after(self.path, run.resumed_step)
            drop_rollouts_after(run.run_dir, run.resumed_step)
        self._file = self.path.open("ab", buffering=0)
        self._waiting = b""
        self.note = f"metrics: {self.path}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line."""
        row = {"step": step} | {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        were_waiting = bool(self._waiting)
        self._waiting += json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if not were_waiting:
                logger.warning(
                    "%s cannot be written: %s; its lines are kept in memory and written later", self.path, error
                )

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: lines kept in memory cannot be written and are lost.
        """
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read a `metrics.jsonl`; `null` becomes NaN, and an incomplete last line is ignored.

    Raises:
        ConfigError: a line other than the last is no JSON object with a step.
    """
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in _rows(path)]


def truncate_after(path: Path, step: int) -> None:
    """Drop the rows after `step` and an incomplete last line; the file is replaced atomically.

    Args:
        path: a `metrics.jsonl`, which need not exist.
        step: the last step to keep.

    Raises:
        ConfigError: a line other than the last is no JSON object with a step.
    """
    if not path.exists():
        return
    kept = [row for row in _rows(path) if row["step"] <= step]
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in kept)
        file.flush()
        os.fsync(file.fileno())  # the replacement must not reach the disk before its content
    scratch.replace(path)


def _rows(path: Path) -> list[dict[str, Any]]:
    # Bytes, because a killed run may have written half of a UTF-8 character.
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
                raise ValueError("no object with a step")
        except ValueError as error:
            if not any(rest.strip() for rest in lines[number:]):
                break
            raise ConfigError(
                f"{path}, line {number}: not a metrics row ({error}); repair or move the file, then resume again"
            ) from error
        rows.append(row)
    return rows
