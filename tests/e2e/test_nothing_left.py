"""However a run ends, what its reward function and its agents have started ends too, daemons and sessions with it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.observed import assert_gone

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]
CODE = """
import os
import subprocess

from grpo_dist.agents.base import AgentLoop

FOLDER = os.path.dirname(os.path.abspath(__file__))
DAEMON = "setsid sh -c 'echo $$ >> {}/pids; sleep 1000 & wait' & exit"


def start_once(name):
    with open(f"{FOLDER}/{name}", "a") as file:
        if file.tell() == 0:
            file.write("started")
            file.flush()
            subprocess.run(["sh", "-c", DAEMON.format(FOLDER)])
            subprocess.Popen(["sh", "-c", f"echo $$ >> {FOLDER}/pids; exec sleep 1000"], start_new_session=True)


class Loop(AgentLoop):
    async def run(self, episode):
        start_once("agent")
        await episode.generate()


def compute_score(data_source, solution_str, ground_truth, extra_info):
    start_once("reward")
    if os.path.exists(f"{FOLDER}/fail"):
        raise ValueError("as the test wants it")
    return 1.0
"""


def kill_workers(driver: psutil.Process) -> None:
    """With SIGKILL, all of them at once."""
    for process in driver.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[0].startswith(("ray::Rollout", "ray::Reward")):
                process.kill()


ENDS: dict[str, tuple[int, Callable[[psutil.Process], None]]] = {
    "done": (0, lambda driver: None),
    "killed": (-signal.SIGKILL, lambda driver: driver.kill()),
    "SIGTERM": (128 + signal.SIGTERM, lambda driver: driver.terminate()),
    "error": (1, lambda driver: None),
    "workers killed": (1, kill_workers),
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_that_custom_code_has_started_outlives_the_run(tmp_path: Path, end: str) -> None:
    (tmp_path / "code.py").write_text(CODE)
    settings = [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/code.py:Loop",
        f"custom_reward_function.path={tmp_path}/code.py",
        "reward.max_failure_rate=0",
        "data.train_batch_size=4",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.export_hf_model=false",
        "trainer.max_worker_restarts=0",
        f"trainer.total_training_steps={1 if end == 'done' else 1000}",
        f"trainer.default_local_dir={tmp_path}/run",
        "ray_kwargs.ray_init.address=local",
    ]
    code, act = ENDS[end]
    command = [sys.executable, "-m", "grpo_dist.main", *settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        pids = tmp_path / "pids"
        while not pids.exists() or len(pids.read_text().split()) < 4:
            assert run.poll() is None, run.communicate()[0][-4000:]
            time.sleep(0.05)
        driver = psutil.Process(run.pid)
        started = {psutil.Process(int(pid)) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))}
        if end == "error":
            (tmp_path / "fail").touch()
        act(driver)
        output = run.communicate(timeout=300)[0]
    assert run.returncode == code, output[-4000:]
    assert "Traceback" not in output or end == "error", output[-4000:]
    assert "Unhandled error" not in output
    assert_gone(started)
