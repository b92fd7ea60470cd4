"""kill -9 while a checkpoint is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

ROUNDS = 50


def test_a_kill_at_any_moment_loses_no_checkpoint(tmp_path: Path) -> None:
    """The process checks after each kill: every folder is whole, has the saved weights, and what was published is found
    again, the older one too.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.trainer.save_until_killed", str(tmp_path), str(ROUNDS)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["newest"] > ROUNDS // 5, "they did get somewhere"
    assert result["midway"] > ROUNDS // 5, "and many were killed while they wrote"
