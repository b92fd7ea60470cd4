"""SIGTERM while an agent plays: the run saves, ends, leaves nothing of the agent, and goes on where it was."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.messages import says
from tests.observed import assert_gone

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(600)]

AGENT = """
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
SETTINGS = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.agent.default_agent_loop=external",
    f"actor_rollout_ref.rollout.n={N}",
    f"data.train_batch_size={GROUPS}",
    "data.shuffle=false",
    "data.val_files=null",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=-1",
    "trainer.export_hf_model=false",
    "ray_kwargs.ray_init.address=local",
]


def trained(folder: Path, step: int) -> Counter[int]:
    """How often each prompt is in a step's batch."""
    lines = (folder / "run" / "rollouts" / f"{step}.jsonl").read_text().splitlines()
    return Counter(int(json.loads(line)["uid"].split("-")[1].removeprefix("prompt")) for line in lines)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_is_stopped_in_an_episode_goes_on_with_the_same_prompts(tmp_path: Path, staleness: int) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    told = {"last": [GROUPS + 1, GROUPS + 2], "goes_on": str(tmp_path / "on"), "pids": str(tmp_path / "pids")}
    rows = [{"prompt": f"{i}+1=?", "extra_info": {"index": i, **told}} for i in range(GROUPS * STEPS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        *SETTINGS,
        f"actor_rollout_ref.rollout.agent.agent_kwargs={{play: '{tmp_path}/agent.py:play'}}",
        f"data.train_files={tmp_path}/rows.jsonl",
        f"trainer.default_local_dir={tmp_path}/run",
        f"trainer.max_staleness={staleness}",
    ]
    command = [sys.executable, "-m", "grpo_dist.main", *settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        pids = tmp_path / "pids"
        while not (tmp_path / "run" / "rollouts" / "1.jsonl").exists() or not pids.exists():  # step 1 has trained
            assert run.poll() is None, run.communicate()[0][-4000:]
            time.sleep(0.1)
        playing = {psutil.Process(int(pid)) for pid in pids.read_text().split()}
        run.send_signal(signal.SIGTERM)
        output = run.communicate(timeout=200)[0]
    assert run.returncode == 128 + signal.SIGTERM, output[-4000:]
    says(output, f"{tmp_path}/run/global_step_1")
    assert "never awaited" not in output
    assert_gone(playing)  # the agent, and what it had started
    (tmp_path / "on").touch()
    again = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0, (again.stdout + again.stderr)[-4000:]
    for step in range(1, STEPS + 1):
        assert trained(tmp_path, step) == dict.fromkeys(range(GROUPS * (step - 1), GROUPS * step), N)
