"""`metrics.jsonl`: the run's own record, one JSON object per step, or two where a validation ended after its step.

Always on, and the source of the summary at the end. Readers get one row per step. A non-finite number is written as
`null`, because JSON has neither NaN nor infinity; `read_metrics` returns it as NaN.

Its steps are those of the run, and so are the files of `rollouts/` (rollouts.py) and `validation/` beside it. Another
run in the folder sets the record of the earlier one aside; one that goes back to an earlier step drops the later ones.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_dist.errors import ConfigError
from grpo_dist.tracking.base import RunInfo, Tracker

METRICS, ROLLOUTS, VALIDATION, TOKENIZER = "metrics.jsonl", "rollouts", "validation", "tokenizer"

logger = logging.getLogger(__name__)


class JsonlTracker(Tracker):
    """Appends `{"step": n, name: number, ...}` to `run_dir/metrics.jsonl`, unbuffered.

    Resuming from a checkpoint drops the steps after it, so that every step is recorded once. A fresh start in a used
    run directory keeps the old file as `metrics.old-N.jsonl`. The same becomes of the rollouts (`set_aside`),
    so that those in the folder are of the steps in the file.

    If a write fails (disk full), lines are kept in memory and written with the next line that succeeds.
    """

    def __init__(self, run: RunInfo) -> None:
        self.path = run.run_dir / METRICS
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
        """Close the file."""
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read a `metrics.jsonl`; `null` becomes NaN, and an incomplete last line is ignored."""
    return [_numbers(row) for row in _sound_rows(path)]


def readable_metrics(path: Path) -> tuple[list[dict[str, float]], list[str]]:
    """Read the lines of a `metrics.jsonl` that can be read; returns them, and what is wrong with the others.

    Raises:
        OSError: the file cannot be read.
    """
    rows, problems, last = _rows(path)
    if not path.read_bytes().endswith(b"\n"):  # that line is being written
        problems.pop(last, None)
    return [_numbers(row) for row in rows], list(problems.values())


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield the number and the JSON object of each line of a file, or in its place what is wrong with the line.

    A number that is not finite, which JSON does not have, is None.
    """
    # Bytes: text of a model may hold what str.splitlines takes for line ends, a killed run leaves half characters.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _json_object(line)


def truncate_after(path: Path, step: int) -> None:
    """Drop the rows after `step` and an incomplete last line; the file, which may not exist, is replaced atomically."""
    if not path.exists():
        return
    kept = [row for row in _sound_rows(path) if row["step"] <= step]
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in kept)
        file.flush()
        os.fsync(file.fileno())  # the replacement must not reach the disk before its content
    scratch.replace(path)


def _json_object(line: bytes) -> dict[str, Any] | str:
    try:
        value = json.loads(line, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return value if isinstance(value, dict) else "no object"


def _finite(written: str) -> float | None:
    number = float(written)
    return number if math.isfinite(number) else None


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in row.items()}


def _sound_rows(path: Path) -> list[dict[str, Any]]:
    rows, problems, last = _rows(path)
    problems.pop(last, None)
    for problem in problems.values():
        raise ConfigError(f"{problem}; repair or move the file, then resume again")
    return rows


def _rows(path: Path) -> tuple[list[dict[str, Any]], dict[int, str], int]:
    """Return a row per step; what is wrong with the other lines, by number; the number of the last line."""
    rows: list[dict[str, Any]] = []
    problems, number = {}, 0
    for number, row in json_objects(path):
        if isinstance(row, dict) and (why := _no_metrics(row)) is None:
            if rows and rows[-1]["step"] == row["step"]:
                rows[-1] |= row
            else:
                rows.append(row)
        else:
            problems[number] = f"{path}, line {number}: not a metrics row ({row if isinstance(row, str) else why})"
    return rows, problems, number


def _no_metrics(row: Mapping[str, Any]) -> str | None:
    """Return why an object is no metrics row; None: it is one."""
    if type(row.get("step")) is not int:
        return "no step"
    for name, value in row.items():
        if not (value is None or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)):
            return f"{name} is no number"
    return None


def set_aside(run_dir: Path) -> None:
    """Rename what an earlier run in this folder has recorded: `metrics.old-N.jsonl`, `rollouts.old-N` and so on."""
    places = [run_dir / name for name in (METRICS, ROLLOUTS, VALIDATION, TOKENIZER)]
    recorded = [path for path in places if path.is_dir() or (path.is_file() and path.stat().st_size)]
    for number in itertools.count(1):
        old = {path: path.with_name(f"{path.stem}.old-{number}{path.suffix}") for path in recorded}
        if not any(path.exists() for path in old.values()):
            break
    for path, new in old.items():
        path.rename(new)


def drop_rollouts_after(run_dir: Path, step: int) -> None:
    """Remove the rollouts of later steps, from which the run has gone back."""
    for name in (ROLLOUTS, VALIDATION):
        for path in (run_dir / name).glob("*"):
            if path.stem.isdecimal() and int(path.stem) > step:
                path.unlink()
