"""However a run ends, what its custom code has started ends too; what was saved is whole, and the run goes on."""

import contextlib
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from grpo_dist.trainer.checkpoint.folder import LATEST, find_checkpoint
from tests.chaos.runs import SETTINGS
from tests.disks import enlarge, small_disk
from tests.e2e.runs import AGENT, PLAIN, command, rollouts, write_rows
from tests.messages import says
from tests.observed import assert_gone

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

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


def kill(*roles: str) -> Callable[[psutil.Process], None]:
    """Send SIGKILL to all workers of some roles at once."""

    def act(driver: psutil.Process) -> None:
        for process in driver.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[0].startswith(tuple(f"ray::{role}" for role in roles)):
                    process.kill()

    return act


# The exit code, and what is done.
ENDS: dict[str, tuple[int, Callable[[psutil.Process], None]]] = {
    "done": (0, lambda driver: None),
    "killed": (-signal.SIGKILL, lambda driver: driver.kill()),
    "SIGTERM": (128 + signal.SIGTERM, lambda driver: driver.terminate()),
    "SIGINT": (128 + signal.SIGINT, lambda driver: driver.send_signal(signal.SIGINT)),
    "error": (1, lambda driver: None),
    "workers killed": (1, kill("Rollout", "Reward")),
    "actor killed": (1, kill("ActorWorker")),
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_that_custom_code_has_started_outlives_the_run(tmp_path: Path, end: str) -> None:
    (tmp_path / "code.py").write_text(CODE)
    settings = [
        *("algorithm.adv_estimator=grpo", "data.train_batch_size=4", "data.val_files=null"),
        *("trainer.export_hf_model=false", f"trainer.total_training_steps={1 if end == 'done' else 1000}"),
        *(f"{AGENT}.default_agent_loop={tmp_path}/code.py:Loop", f"custom_reward_function.path={tmp_path}/code.py"),
        *("reward.max_failure_rate=0", "trainer.max_worker_restarts=0", "trainer.max_actor_restarts=0"),
    ]
    code, act = ENDS[end]
    # a background job of a script has SIGINT ignored, and its children inherit that
    interruptible = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command(tmp_path / "run", *settings), **pipes, **interruptible) as run:
        pids = tmp_path / "pids"
        while not pids.exists() or len(pids.read_text().split()) < 4:
            assert run.poll() is None, run.communicate()[0][-4000:]
            time.sleep(0.05)
        driver = psutil.Process(run.pid)
        started = {psutil.Process(int(pid)) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))}
        family = {driver, *driver.children(recursive=True)} if code > 0 else set()  # with Ray's own processes
        if end == "error":
            (tmp_path / "fail").touch()
        act(driver)
        output = run.communicate(timeout=300)[0]
    assert run.returncode == code, output[-4000:]
    assert "Traceback" not in output or end == "error", output[-4000:]
    assert "Unhandled error" not in output
    if end == "actor killed":
        says(output, "error: actor worker", "died")
    assert_gone(started | family)


PLAYER = """
import asyncio
import os
import subprocess

from openai import AsyncOpenAI


async def play(task, base_url, token):
    client = AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0)
    await client.chat.completions.create(model="policy", messages=task["messages"], max_tokens=8)
    if task["index"] in task["last"] and not os.path.exists(task["goes_on"]):
        tool = subprocess.Popen(["sleep", "1000"])
        with open(task["pids"], "a") as file:
            file.write(f"{os.getpid()} {tool.pid}\\n")
        await asyncio.sleep(1000)
    return {"reward": 1.0}
"""
N, GROUPS, STEPS = 2, 4, 3


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_is_stopped_in_an_episode_goes_on_with_the_same_prompts(tmp_path: Path, staleness: int) -> None:
    (tmp_path / "agent.py").write_text(PLAYER)
    told = {"last": [GROUPS + 1, GROUPS + 2], "goes_on": str(tmp_path / "on"), "pids": str(tmp_path / "pids")}
    rows = [{"prompt": f"{i}+1=?", "extra_info": {"index": i, **told}} for i in range(GROUPS * STEPS)]
    settings = [
        "algorithm.adv_estimator=grpo",
        *(f"{AGENT}.default_agent_loop=external", f"{AGENT}.agent_kwargs={{play: '{tmp_path}/agent.py:play'}}"),
        *(f"actor_rollout_ref.rollout.n={N}", f"data.train_batch_size={GROUPS}", "data.shuffle=false"),
        *(*PLAIN, f"trainer.total_training_steps={STEPS}", f"trainer.max_staleness={staleness}"),
        write_rows(tmp_path / "rows.jsonl", rows),
    ]
    run_dir, pids = tmp_path / "run", tmp_path / "pids"
    arguments = command(run_dir, *settings)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        while not (run_dir / "rollouts" / "1.jsonl").exists() or not pids.exists():  # step 1 has trained
            assert run.poll() is None, run.communicate()[0][-4000:]
            time.sleep(0.1)
        playing = {psutil.Process(int(pid)) for pid in pids.read_text().split()}
        run.send_signal(signal.SIGTERM)
        output = run.communicate(timeout=200)[0]
    assert run.returncode == 128 + signal.SIGTERM, output[-4000:]
    says(output, f"{run_dir}/global_step_1")
    assert "never awaited" not in output
    assert_gone(playing)  # the agent, and what it had started
    (tmp_path / "on").touch()
    again = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0, (again.stdout + again.stderr)[-4000:]
    for step in range(1, STEPS + 1):
        trained = Counter(int(row["uid"].split("-")[1].removeprefix("prompt")) for row in rollouts(run_dir, step))
        assert trained == dict.fromkeys(range(GROUPS * (step - 1), GROUPS * step), N)


def test_a_disk_that_holds_one_checkpoint(tmp_path: Path) -> None:
    """A checkpoint of the built-in model has 5.7 MB. The second is refused whole; with more room the run goes on."""
    with small_disk(tmp_path / "disk", mib=5) as disk:
        run_dir = disk / "run"

        def run() -> tuple[int, str]:
            arguments = command(run_dir, *SETTINGS, "trainer.total_training_steps=2")
            done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=400)
            return done.returncode, done.stderr

        code, told = run()
        assert code == 2, told[-3000:]
        says(told, f"trainer.default_local_dir={run_dir}", "GiB")
        assert not run_dir.exists(), "before anything is written"
        enlarge(disk, mib=10)
        code, told = run()
        assert code == 1, told[-3000:]
        says(told, f"{run_dir}/global_step_2", "GiB", f"trainer.default_local_dir={run_dir}")
        assert sorted(path.name for path in run_dir.glob("*global_step*")) == ["global_step_1"]
        assert (run_dir / LATEST).read_text() == "1"
        assert find_checkpoint(run_dir, "auto", None) == run_dir / "global_step_1"
        enlarge(disk, mib=64)
        code, told = run()
        assert code == 0, told[-3000:]
        assert f"resumed from {run_dir}/global_step_1" in told
        assert find_checkpoint(run_dir, "auto", None) == run_dir / "global_step_2"
