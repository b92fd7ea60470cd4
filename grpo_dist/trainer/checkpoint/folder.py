"""Layout of a checkpoint, and how checkpoints are published, found and removed so that a crash loses none.

    RUN_DIR/global_step_N/actor/         model, optimizer, schedule (torch.distributed.checkpoint), random states
    RUN_DIR/global_step_N/ref/           the reference's weights, if they have changed (iterative GRPO)
    RUN_DIR/global_step_N/groups/        groups for later steps that were sampled ahead and scored, if any
    RUN_DIR/global_step_N/state.json     the state of the run: see `RunState`
    RUN_DIR/global_step_N/config.yaml    the resolved config, without secrets
    RUN_DIR/global_step_N/manifest.json  size and digest of each file, versions
    RUN_DIR/latest_checkpointed_iteration.txt   N

A checkpoint is written into `global_step_N.tmp`, flushed to disk and renamed; the pointer is replaced last. An existing
checkpoint of the same step is renamed to `global_step_N.old` until the new one is in place.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_dist.assets.model_folder import read_usage
from grpo_dist.engines.train.durable_files import (
    FileDigest,
    delete,
    digest_file,
    flush_path,
    flush_tree,
    require_room,
    write_durably,
)
from grpo_dist.errors import CheckpointError
from grpo_dist.tracking.metric_names import is_loss
from grpo_dist.trainer.checkpoint.manifest import checkpoint_digest, damage, read_manifest, write_manifest

LATEST = "latest_checkpointed_iteration.txt"
STATE, CONFIG = "state.json", "config.yaml"
WRITING, ASIDE, REMOVING = ".tmp", ".old", ".removed"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunState:
    """The state of a run besides the shards of its models.

    Attributes:
        step: the last finished one.
        weight_version: of the weights that the engines hold after that step, where there are engines.
        sampler: position in the order of the rows.
        baselines: of agents, by the number of their name (algorithms/controllers.py).
        ledger: prompts that were drawn but not trained on.
        prompts: number and fingerprint of the training rows, to which the positions in `ledger` refer.
        code: digests of the Python files that the config names, by config key.
        metrics: validation metrics after this step; {} if it was not validated.
        validating: whether the validation after this step was still going on.
        finished: descriptions of the groups in groups/ (checkpoint/saver.py).
        history: digests of the checkpoints of this run before this one, oldest first.
    """

    step: int
    weight_version: int
    sampler: dict[str, Any]
    kl_coef: float = 0.0
    entropy: dict[str, float] = field(default_factory=dict)
    baselines: dict[str, float] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=lambda: {"open": {}, "backlog": []})
    prompts: dict[str, Any] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    validating: bool = False
    trackers: dict[str, str] = field(default_factory=dict)
    finished: list[dict[str, Any]] = field(default_factory=list)
    history: list[str] = field(default_factory=list)


# --- writing ---------------------------------------------------------------------------------------------------------
def begin_checkpoint(run_dir: Path, step: int, num_bytes: int = 0) -> Path:
    """Create an empty folder, readable only by the user, for the checkpoint of `step`, which takes `num_bytes`.

    Raises:
        CheckpointError: it cannot be created, or the disk has less room.
    """
    temporary = run_dir / f"global_step_{step}{WRITING}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        delete(temporary)
        require_room(run_dir, num_bytes)
        temporary.mkdir(mode=0o700)
    except OSError as error:
        raise cannot_write(temporary, error) from error
    return temporary


def publish_checkpoint(
    temporary: Path, state: RunState, config: str, digests: Mapping[str, FileDigest] | None = None
) -> Path:
    """Complete the checkpoint in `temporary`, rename it to its final name, which is returned, and update the pointer.

    Args:
        temporary: the folder of `begin_checkpoint`, with the files of the roles.
        config: the content of config.yaml.
        digests: digests that the writers of files have already computed, by path.

    Raises:
        CheckpointError: a file cannot be written; earlier checkpoints are unchanged.
    """
    run_dir = temporary.parent
    final = temporary.with_suffix("")
    aside = final.with_suffix(ASIDE)
    try:
        write_durably(temporary / STATE, json.dumps(asdict(state), indent=2))
        write_durably(temporary / CONFIG, config)
        before = checkpoints(run_dir)[-1:]
        after = _written_at(before[0]) if before else 0.0
        write_manifest(temporary, state.step, digests or {}, written_after=after)
        flush_tree(temporary)
        if os.path.lexists(final):  # written before the run was resumed from an earlier step
            _remove(aside)
            final.rename(aside)
        temporary.rename(final)
        flush_path(run_dir)
        pointer = run_dir / f"{LATEST}.tmp"
        write_durably(pointer, str(state.step))
        pointer.replace(run_dir / LATEST)
        flush_path(run_dir)
        _remove(aside)
    except OSError as error:
        if os.path.lexists(aside) and not os.path.lexists(final):
            aside.rename(final)
        discard_checkpoint(temporary)
        raise cannot_write(final, error) from error
    return final


def discard_checkpoint(temporary: Path) -> None:
    """Remove the folder of an abandoned checkpoint; errors are ignored."""
    with contextlib.suppress(OSError):
        delete(temporary)


def cannot_write(folder: Path, error: object) -> CheckpointError:
    """The error for a checkpoint that cannot be written."""
    key = f"trainer.default_local_dir={folder.parent}"
    return CheckpointError(
        f"cannot write checkpoint {folder}: {error}. Earlier checkpoints are unchanged. Free disk space, or make the "
        f"folder writable ({key}), and run the same command again: it resumes from the last checkpoint"
    )


def leftovers(run_dir: Path) -> list[Path]:
    """Return what a killed run has left half written, half removed, or replaced."""
    unfinished = [path for path in run_dir.glob("global_step_*") if path.suffix in (WRITING, ASIDE, REMOVING)]
    return [path for path in unfinished if path.suffix != ASIDE or path.with_suffix("").exists()]


def clear_leftovers(run_dir: Path) -> None:
    """Remove checkpoints that a killed run left half written or half removed, and restore `.old` ones it replaced.

    Raises:
        CheckpointError: a folder cannot be removed or renamed.
    """
    path = run_dir
    try:
        for path in leftovers(run_dir):
            delete(path)
        for path in list(run_dir.glob(f"global_step_*{ASIDE}")):
            path.with_suffix("").unlink(missing_ok=True)  # a link that leads nowhere
            path.rename(path.with_suffix(""))
    except OSError as error:
        raise _cannot_clear(run_dir, path, error) from error


def forget_last(run_dir: Path) -> None:
    """Remove the pointer where a run starts anew, whatever the run before has left.

    Raises:
        CheckpointError: it cannot be removed.
    """
    try:
        (run_dir / LATEST).unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_clear(run_dir, run_dir / LATEST, error) from error


def _cannot_clear(run_dir: Path, path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"trainer.default_local_dir={run_dir}: {path}, left by an earlier run, cannot be cleared away: {error}; see "
        "what it is, and move it away"
    )


# --- finding ---------------------------------------------------------------------------------------------------------
def find_checkpoint(run_dir: Path, resume_mode: str, resume_from_path: str | None) -> Path | None:
    """The checkpoint to resume from, with all its files verified; None for a fresh run.

    With `auto` it is the one that the pointer names or, if that is damaged, the newest intact one before it. Damaged
    checkpoints are reported in a warning.

    Raises:
        CheckpointError: `resume_from_path` is not an intact checkpoint, or there are checkpoints but none is intact.
    """
    if resume_mode == "disable":
        return None
    if resume_mode == "resume_path":
        folder = Path(resume_from_path or "")
        if problems := _problems(folder):
            key = f"trainer.resume_from_path={resume_from_path}"
            raise CheckpointError(f"{key}: not an intact checkpoint: {'; '.join(problems)}. Choose another one")
        return folder
    folders = {path.name: path for path in reversed(checkpoints(run_dir))}
    pointer, wrong = _read_pointer(run_dir, bool(folders))
    if pointer in folders:
        # then earlier steps; later ones were written before the run was resumed from an earlier step
        step = step_of(folders[pointer])
        earlier = {name: path for name, path in folders.items() if step_of(path) < step}
        folders = {pointer: folders[pointer]} | earlier | folders
    for folder in folders.values():
        problems = _problems(folder)
        if not problems:
            if wrong:
                logger.warning("resuming from %s, because:\n%s", folder, "\n".join(f"  {text}" for text in wrong))
            return folder
        wrong.append(f"{folder}: {'; '.join(problems)}")
    if wrong:
        listed = "\n".join(f"  {text}" for text in wrong)
        raise CheckpointError(
            f"trainer.default_local_dir={run_dir}: there is no intact checkpoint to resume from:\n{listed}\nRestore "
            "one from a copy, or start anew with trainer.resume_mode=disable or another trainer.default_local_dir"
        )
    return None


def last_checkpoint(run_dir: Path) -> Path | None:
    """The folder that the pointer names, intact or not; None if there is none."""
    name, _ = _read_pointer(run_dir, expected=False)
    return run_dir / name if name and (run_dir / name).is_dir() else None


def own_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Return the checkpoints of the run whose last one the pointer names, by step; {} if it names none.

    Others in the folder, of a run before that or of steps from which the run has gone back, are not among them.
    """
    last = last_checkpoint(run_dir)
    if last is None:
        return {}
    history: list[str] = []
    with contextlib.suppress(CheckpointError):  # damaged: of the others nothing is known
        history = read_state(last).history
    by_step = {}
    for path in checkpoints(run_dir):
        with contextlib.suppress(CheckpointError):
            if path != last and checkpoint_digest(path) in history:
                by_step[step_of(path)] = path
    return dict(sorted(by_step.items())) | {step_of(last): last}


def read_state(folder: Path) -> RunState:
    """Read the state of a checkpoint.

    Raises:
        CheckpointError: state.json is damaged.
    """
    try:
        return RunState(**json.loads((folder / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / STATE} is damaged: {error}") from error


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, including damaged ones, in the order they were written.

    That is not the order of steps: a run that resumes from an earlier step, or starts anew, writes lower steps later.
    """
    if not run_dir.is_dir():
        return []
    steps = [(int(m[1]), path) for path in run_dir.iterdir() if (m := re.fullmatch(r"global_step_(\d+)", path.name))]
    return [path for _, _, path in sorted((_written_at(path), step, path) for step, path in steps)]


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("_")[2])


def _written_at(folder: Path) -> float:
    try:
        return float(read_manifest(folder)["written_at"])
    except CheckpointError:
        return folder.lstat().st_mtime


def _problems(folder: Path) -> list[str]:
    if not folder.is_dir():
        return ["there is no such folder"]
    problems = damage(folder)
    if not problems:
        try:
            read_state(folder)
        except CheckpointError as error:
            return [str(error)]
    return problems


def _read_pointer(run_dir: Path, expected: bool) -> tuple[str, list[str]]:
    """(name of the folder that the pointer names, or ""; what is wrong with the pointer)."""
    path = run_dir / LATEST
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return "", [f"{path} is missing"] if expected else []
    except (OSError, UnicodeDecodeError) as error:
        return "", [f"{path} cannot be read: {error}"]
    if not re.fullmatch(r"\d+", text):
        return "", [f"{path} is damaged: it holds {text[:40]!r}, not a step"]
    name = f"global_step_{int(text)}"
    return name, [] if (run_dir / name).is_dir() else [f"{path} names {name}, which is missing"]


# --- keeping ---------------------------------------------------------------------------------------------------------
def prune_checkpoints(run_dir: Path, newest: int | None, best_metric: str | None = None) -> list[Path]:
    """Keep the `newest` last written checkpoints and the one with the best `best_metric`; remove the others.

    Damaged checkpoints are neither counted nor removed, since a person may want to recover them. Returns the intact
    ones that were kept.

    Raises:
        CheckpointError: a checkpoint cannot be removed.
    """
    whole = [path for path in checkpoints(run_dir) if not damage(path, contents=False)]
    kept = whole[-newest:] if newest is not None else whole
    best = best_checkpoint(whole, best_metric) if best_metric is not None else None
    kept = [path for path in whole if path in kept or path == best]
    for path in whole:
        if path not in kept:
            try:
                _remove(path)
            except OSError as error:
                raise CheckpointError(f"trainer.max_actor_ckpt_to_keep: cannot remove {path}: {error}") from error
    return kept


def best_checkpoint(folders: Sequence[Path], metric: str) -> Path | None:
    """The first checkpoint with the highest `metric`, of a loss with the lowest; None if none of them was validated."""
    sign = -1 if is_loss(metric) else 1
    goodness = {}
    for path in folders:
        with contextlib.suppress(CheckpointError):  # damaged: its metrics are unknown
            value = read_state(path).metrics.get(metric)
            if value is not None and not math.isnan(value):
                goodness[path] = sign * value
    return max(goodness, key=goodness.__getitem__, default=None)


def _remove(folder: Path) -> None:
    """Remove a checkpoint; a crash meanwhile leaves nothing that looks like a checkpoint."""
    if not os.path.lexists(folder):
        return
    removing = folder.with_suffix(REMOVING)
    with contextlib.suppress(OSError):
        delete(removing)
    os.rename(folder, removing)
    delete(removing)


# --- which checkpoint, and which run, an exported model is of: by digests, never by steps or times of files -----------
def is_model_of(model: Path, checkpoint: Path) -> bool:
    """Return whether an exported model, or adapter, has the weights of this checkpoint and of no other.

    Raises:
        CheckpointError: the manifest of the checkpoint cannot be read.
        DataError: the model's grpo_dist.json is damaged.
    """
    return read_usage(model).checkpoint == checkpoint_digest(checkpoint)


def is_model_of_run(model: Path, run_dir: Path) -> bool:
    """Return whether a run exported this model at its end, and none has been started anew in its folder since then.

    Raises:
        DataError: the model's grpo_dist.json is damaged.
    """
    written = read_usage(model).run
    return written is not None and written == run_digest(run_dir)


def run_digest(run_dir: Path) -> str | None:
    """Return the digest of the config.yaml that a run writes at its start; None: there is none."""
    file = run_dir / CONFIG
    return digest_file(file).blake2b if file.is_file() else None


def others(run_dir: Path) -> str:
    """Return what to add to a message of checkpoints that are not of the pointer's run; "" if there are none."""
    own = own_checkpoints(run_dir).values()
    if not (left := [path.name for path in checkpoints(run_dir) if path not in own]):
        return ""
    return (
        f". Not of this run, by what {LATEST} names: {', '.join(sorted(left))}. They are of a run before "
        "it, of steps from which it has gone back, or of an older version of grpo_dist; to have one of them, name its "
        f"folder: {run_dir / left[-1]}"
    )
