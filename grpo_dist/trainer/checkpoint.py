"""What a run's checkpoint is, and how one is written without ever leaving a broken newest one.

    RUN_DIR/global_step_N/actor/      model, optimizer and schedule (torch.distributed.checkpoint)
    RUN_DIR/global_step_N/ref/        the reference's weights, if it moves (iterative GRPO)
    RUN_DIR/global_step_N/state.json  step, weight version, sampler position, model path, KL coefficient,
                                      and the prompts that were drawn and have not trained
    RUN_DIR/latest_checkpointed_iteration.txt   N

A checkpoint is written into `global_step_N.tmp`, flushed to disk and renamed; the pointer is replaced last.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_dist.errors import CheckpointError

LATEST = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class RunState:
    """What a run needs, besides the actor's shards, to go on."""

    step: int
    weight_version: int
    sampler: dict[str, Any]
    model_path: str
    kl_coef: float = 0.0
    ledger: dict[str, Any] = field(default_factory=lambda: {"open": {}, "backlog": []})


def save_checkpoint(
    run_dir: Path, state: RunState, write: Mapping[str, Callable[[str], None]], keep: int | None
) -> Path:
    """Write `global_step_N` and point to it; then remove all but the `keep` newest.

    Args:
        run_dir: the run directory.
        state: goes into state.json.
        write: by sub-folder, what writes a role's shards into the folder it is given.
        keep: how many to keep; None: all.

    Raises:
        CheckpointError: the disk refuses; earlier checkpoints are untouched.
    """
    final = run_dir / f"global_step_{state.step}"
    temporary = final.with_suffix(".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, write_role in write.items():
            write_role(str(temporary / name))
        (temporary / "state.json").write_text(json.dumps(asdict(state), indent=2))
        _flush(temporary)
        shutil.rmtree(final, ignore_errors=True)  # from an earlier life of this run
        temporary.rename(final)
        pointer = run_dir / f"{LATEST}.tmp"
        pointer.write_text(str(state.step))
        _flush_path(pointer)
        pointer.replace(run_dir / LATEST)
        _flush_path(run_dir)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"cannot write checkpoint {final}: {error}") from error
    _prune(run_dir, keep)
    return final


def find_checkpoint(run_dir: Path, resume_mode: str, resume_from_path: str | None) -> Path | None:
    """The checkpoint to go on from, or None for a fresh run.

    Raises:
        CheckpointError: `resume_path` names a folder that is not a checkpoint, or the pointer names a missing one.
    """
    if resume_mode == "disable":
        return None
    if resume_mode == "resume_path":
        folder, key = Path(resume_from_path or ""), f"trainer.resume_from_path={resume_from_path}"
    else:
        pointer = run_dir / LATEST
        if not pointer.is_file():
            return None
        folder, key = run_dir / f"global_step_{pointer.read_text().strip()}", str(pointer)
    if not (folder / "state.json").is_file():
        raise CheckpointError(f"{key}: {folder} is not a checkpoint (it has no state.json)")
    return folder


def read_state(folder: Path) -> RunState:
    """The state of a checkpoint folder.

    Raises:
        CheckpointError: state.json is damaged.
    """
    try:
        return RunState(**json.loads((folder / "state.json").read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / 'state.json'} is damaged: {error}") from error


def _prune(run_dir: Path, keep: int | None) -> None:
    found = [(int(m[1]), path) for path in run_dir.iterdir() if (m := re.fullmatch(r"global_step_(\d+)", path.name))]
    for _, path in sorted(found)[: -keep or None] if keep else []:
        shutil.rmtree(path)


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _flush_path(path)


def _flush_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
