"""Where a relative run directory lies: never in a folder that is deleted with the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_dist.assets.paths import expanded

# Ray's folder for what `ray job submit --working-dir` sends along; each job's copy is deleted after the job.
WORKING_COPIES = "working_dir_files"


def keep_run_dir(raw: dict[str, Any]) -> list[str]:
    """Take a relative run directory from the home folder where the present one is Ray's working copy of a job.

    Args:
        raw: the composed config, in which the key is replaced.

    Returns:
        A note for the user, if that was done.
    """
    trainer = raw.get("trainer")
    given = trainer.get("default_local_dir") if isinstance(trainer, dict) else None
    if not isinstance(trainer, dict) or not isinstance(given, str) or not given or expanded(given).is_absolute():
        return []
    here = Path.cwd()
    if WORKING_COPIES not in here.parts:
        return []
    trainer["default_local_dir"] = str(Path.home() / given)
    return [
        f"trainer.default_local_dir={given}: results go to {trainer['default_local_dir']}, because Ray deletes the "
        f"working copy of this job ({here}); set an absolute path, on several machines one on a disk that they share"
    ]
