"""`grpo_dist.train` as notebooks and scripts call it: within a running event loop, in a thread, twice in a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.deep]

SCRIPT = """
import asyncio, sys, threading
import grpo_dist

LIMIT = 60
folder = sys.argv[1]
rows = [{"data_source": "mine", "prompt": f"{a}+{b}=?", "reward_model": {"ground_truth": str(a + b)}}
        for a in range(10, 14) for b in range(2)]
config = {"model": "tiny", "data.train_batch_size": 2, "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
          "actor_rollout_ref.rollout.n": 2, "data.max_prompt_length": 32, "data.max_response_length": 16,
          "trainer": {"logger": [], "test_freq": 1, "total_epochs": 1},
          "ray_kwargs.ray_init.address": "local"}

def right(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.split("\\n")[-1] == ground_truth)

def short(completions, **columns):
    return [-len(text) / LIMIT for text in completions]

def run(name, functions):
    seen = []
    def second_is_enough(step, metrics):
        seen.append((step, "critic/score/mean" in metrics))
        return step == 2
    result = grpo_dist.train(reward_funcs=functions, train_dataset=rows, callbacks=[second_is_enough],
                             config=config | {"trainer.default_local_dir": f"{folder}/{name}"})
    assert seen == [(1, True), (2, True)], seen
    assert [row["step"] for row in result.metrics] == [0, 1, 2], result.metrics
    assert (result.model_path / "model.safetensors").is_file()
    return result

async def in_a_running_loop():
    return run("first", [right, short])

names = " ".join(asyncio.run(in_a_running_loop()).metrics[1])
assert "short" in names and "right" in names, names
if sys.argv[2] == "twice":
    second = []
    thread = threading.Thread(target=lambda: second.append(run("second", short)))
    thread.start(); thread.join()
    assert len(second) == 1
"""


@pytest.mark.parametrize("times", ["once", pytest.param("twice", marks=pytest.mark.long)])
def test_a_script_that_trains(tmp_path: Path, times: str) -> None:
    """Its functions are in no module that a worker could import; the callback ends each run after two steps of four.

    The first run is within a running event loop, the second in a thread.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    run = [sys.executable, "script.py", str(tmp_path), times]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
