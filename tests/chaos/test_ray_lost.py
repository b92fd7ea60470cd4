"""Ray is killed or stopped under a run: it says so and ends with its own exit code, and the same command goes on."""

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from grpo_dist.errors import RayLost
from tests.chaos.runs import SETTINGS, saved
from tests.messages import says
from tests.observed import assert_gone, command_line

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


class Run:
    """A run that has saved, and Ray's process `name` of it, which a test harms."""

    def __init__(self, run_dir: Path, name: str) -> None:
        short = ["trainer.total_training_steps=200", "trainer.test_freq=-1", "trainer.val_before_train=false"]
        settings = [*SETTINGS, "trainer.worker_timeout_s=300", *short, f"trainer.default_local_dir={run_dir}"]
        command = [sys.executable, "-m", "grpo_dist.main", *settings]
        # a shell's background job ignores Ctrl-C, and so would the run
        self.driver = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.pointer = saved(self.driver, run_dir)
        below = psutil.Process(self.driver.pid).children(recursive=True)
        (self.victim,) = [each for each in below if each.name().startswith(name[:15])]
        self.rays = {each for each in below if command_line(each).startswith("ray::") or "/ray/" in command_line(each)}

    def end(self, code: int) -> tuple[str, float]:
        """Wait for the end; what the run said, and the seconds until then."""
        begun = time.monotonic()
        _, said = self.driver.communicate(timeout=120)
        assert self.driver.returncode == code, said[-6000:]
        assert "Traceback" not in said
        assert "Unhandled error" not in said
        seconds = time.monotonic() - begun
        assert_gone(self.rays, within_s=30)
        return said, seconds


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_the_run_ends_at_once_and_the_command_that_it_names_goes_on(
    name: str, number: signal.Signals, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run = Run(run_dir, name)
    run.victim.send_signal(number)
    said, seconds = run.end(RayLost.exit_code)
    assert seconds < 50, "before Ray ends it"
    last = int(run.pointer.read_text())
    says(said, name, f"{run_dir}/global_step_{last}")
    program, *again = shlex.split(said.partition("to go on:")[2].splitlines()[0])
    assert Path(program).name == "grpo-dist"
    command = [sys.executable, "-m", "grpo_dist", *again, f"trainer.total_training_steps={last + 1}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    says(done.stderr, f"resumed from {run_dir}/global_step_{last}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_ends_a_run_whose_ray_hangs(name: str, number: signal.Signals, times: int, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", name)
    run.victim.suspend()
    for _ in range(times):
        run.driver.send_signal(number)
        time.sleep(1)
    said, seconds = run.end(128 + number)
    assert seconds < 60
    says(said, number.name, f"{tmp_path}/run/global_step_{int(run.pointer.read_text())}")


def test_a_signal_ends_a_run_whose_worker_hangs(tmp_path: Path) -> None:
    """The first one waits for the end of the step, which does not come; the second one does not."""
    run = Run(tmp_path / "run", "raylet")
    for each in run.rays:
        if command_line(each).startswith("ray::ActorWorker"):
            each.suspend()
    for _ in range(2):
        run.driver.send_signal(signal.SIGTERM)
        time.sleep(1)
    said, seconds = run.end(128 + signal.SIGTERM)
    assert seconds < 60
    says(said, "SIGTERM")
