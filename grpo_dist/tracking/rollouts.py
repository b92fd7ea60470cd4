"""The files of a run that hold its rollouts: texts for people, and tokens for the report and for programs.

rollouts/STEP.jsonl     prompts, responses, scores as text: a JSON object for each response
rollouts/STEP.parquet   the columns of the step's batch (protocol/fields.py), a row for each response
tokenizer/              what turns token ids into text, as it was in the run
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from grpo_dist.errors import DiskError
from grpo_dist.protocol import DataProto
from grpo_dist.protocol.fields import EXTRA, FIELDS
from grpo_dist.protocol.parquet import write_parquet
from grpo_dist.tracking.jsonl import ROLLOUTS, TOKENIZER


def is_recorded(column: str) -> bool:
    """Tell if a column of the batch is written into the Parquet file."""
    return FIELDS[column].recorded if column in FIELDS else column.startswith(EXTRA)


def recorded_steps(run_dir: Path, folder: str = ROLLOUTS) -> list[int]:
    """Steps whose rollouts, or validations, are there as text, in order."""
    return sorted(int(path.stem) for path in (run_dir / folder).glob("*.jsonl") if path.stem.isdecimal())


def write_tokens(data: DataProto, path: Path, save_tokenizer: Callable[[str], object]) -> None:
    """Write a batch, and once for the run its tokenizer beside the folder; files are whole or not there.

    Args:
        path: RUN_DIR/rollouts/STEP.parquet.
        save_tokenizer: writes the run's tokenizer into a folder.

    Raises:
        DiskError: they cannot be written; the message names the key without which they are not needed.
    """
    temporary, folder = path.with_suffix(".parquet.tmp"), path.parent.parent / TOKENIZER
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_parquet(data, temporary)
        temporary.replace(path)
        if not folder.exists():
            scratch = folder.with_name(f"{TOKENIZER}.tmp")
            shutil.rmtree(scratch, ignore_errors=True)
            save_tokenizer(str(scratch))
            scratch.replace(folder)
    except OSError as error:
        raise DiskError(
            f"cannot write {path}: {error}. Free disk space, set trainer.default_local_dir to another folder, lower "
            "trainer.log_rollouts_max_gib, or trainer.log_rollouts=false"
        ) from error


def make_room(folder: Path, most_bytes: float) -> list[int]:
    """Remove the files of the oldest steps, but never the newest, while all take over `most_bytes`; their steps."""
    steps: dict[int, list[Path]] = {}
    for path in folder.iterdir():
        if path.stem.isdecimal():
            steps.setdefault(int(path.stem), []).append(path)
    sizes = {step: sum(path.stat().st_size for path in paths) for step, paths in steps.items()}
    removed = []
    for step in sorted(steps)[:-1]:
        if sum(sizes.values()) <= most_bytes:
            break
        for path in steps[step]:
            path.unlink(missing_ok=True)
        del sizes[step]
        removed.append(step)
    return removed
