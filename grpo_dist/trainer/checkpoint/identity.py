"""Which checkpoint, and which run, an exported model is of: by digests, never by steps or times of files."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.assets.model_folder import read_usage
from grpo_dist.engines.train.durable_files import digest_file
from grpo_dist.trainer.checkpoint.folder import CONFIG, LATEST, checkpoints, own_checkpoints
from grpo_dist.trainer.checkpoint.manifest import checkpoint_digest


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
    """Return what to add to a message, of checkpoints that are not of the run whose last one the pointer names; "" if
    there are none.
    """
    own = own_checkpoints(run_dir).values()
    if not (left := [path.name for path in checkpoints(run_dir) if path not in own]):
        return ""
    return (
        f". Not of this run, by what {LATEST} names: {', '.join(sorted(left))}. They are of a run before "
        "it, of steps from which it has gone back, or of an older version of grpo_dist; to have one of them, name its "
        f"folder: {run_dir / left[-1]}"
    )
