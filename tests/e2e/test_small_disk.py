"""The main job on a disk that holds one checkpoint: the second is refused whole, and with more room the run goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.trainer.checkpoint.folder import LATEST, find_checkpoint
from tests.chaos.runs import SETTINGS
from tests.disks import enlarge, small_disk
from tests.messages import says

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


def run(run_dir: Path) -> subprocess.CompletedProcess[str]:
    settings = [*SETTINGS, "trainer.total_training_steps=2", f"trainer.default_local_dir={run_dir}"]
    command = [sys.executable, "-m", "grpo_dist.main", *settings]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)


def test_a_disk_that_holds_one_checkpoint(tmp_path: Path) -> None:
    """A checkpoint of the built-in model has 5.7 MB."""
    with small_disk(tmp_path / "disk", mib=5) as disk:
        run_dir = disk / "run"
        refused = run(run_dir)
        assert refused.returncode == 2, refused.stderr[-3000:]
        says(refused.stderr, f"trainer.default_local_dir={run_dir}", "GiB")
        assert not run_dir.exists(), "before anything is written"
        enlarge(disk, mib=10)
        ended = run(run_dir)
        assert ended.returncode == 1, ended.stderr[-3000:]
        says(ended.stderr, f"{run_dir}/global_step_2", "GiB", f"trainer.default_local_dir={run_dir}")
        assert sorted(path.name for path in run_dir.glob("*global_step*")) == ["global_step_1"]
        assert (run_dir / LATEST).read_text() == "1"
        assert find_checkpoint(run_dir, "auto", None) == run_dir / "global_step_1"
        enlarge(disk, mib=64)
        done = run(run_dir)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"resumed from {run_dir}/global_step_1" in done.stderr
        assert find_checkpoint(run_dir, "auto", None) == run_dir / "global_step_2"
