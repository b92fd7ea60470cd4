"""Ray itself is killed under a run: it says so, ends with an exit code of its own, and the same command goes on."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from grpo_dist.errors import RayLost
from tests.chaos.runs import SETTINGS, ray_processes
from tests.messages import says
from tests.observed import assert_gone

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_the_run_ends_at_once_and_the_command_that_it_names_goes_on(name: str, tmp_path: Path) -> None:
    before = ray_processes()
    run_dir = tmp_path / "run"
    short = ["trainer.total_training_steps=200", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    command = [sys.executable, "-m", "grpo_dist.main", *SETTINGS, *short, f"trainer.default_local_dir={run_dir}"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pointer, deadline = run_dir / "latest_checkpointed_iteration.txt", time.monotonic() + 300
    while not pointer.exists():
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    rays = ray_processes() - before
    (victim,) = [each for each in psutil.Process(driver.pid).children() if each.name().startswith(name[:15])]
    victim.kill()
    killed = time.monotonic()
    _, said = driver.communicate(timeout=120)
    assert driver.returncode == RayLost.exit_code, said[-6000:]
    assert time.monotonic() - killed < 50, "before Ray ends it"
    last = int(pointer.read_text())
    says(said, name, f"{run_dir}/global_step_{last}")
    assert_gone(rays, within_s=30)
    again = shlex.split(said.partition("to go on:")[2].splitlines()[0])
    done = subprocess.run(
        [*again, f"trainer.total_training_steps={last + 1}"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    says(done.stderr, f"resumed from {run_dir}/global_step_{last}")
