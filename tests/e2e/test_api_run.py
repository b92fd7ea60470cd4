"""`grpo_dist.train` as notebooks and scripts call it: within a running event loop, in a thread, twice in a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.deep]

SCRIPT = """
import asyncio, json, sys, threading
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

first = asyncio.run(in_a_running_loop())
named = [name for name in first.metrics[1] if "short" in name or "right" in name]
assert any("short" in name for name in named) and any("right" in name for name in named), named

if sys.argv[2] == "twice":
    second = []
    thread = threading.Thread(target=lambda: second.append(run("second", short)))
    thread.start(); thread.join()
    assert len(second) == 1
try:
    grpo_dist.train(config={"trainer.seeds": 1})
except grpo_dist.errors.ConfigError as error:
    assert "trainer.seeds" in str(error)
else:
    raise AssertionError("a wrong key was taken")
print("all is well")
"""


@pytest.mark.parametrize("times", ["once", pytest.param("twice", marks=pytest.mark.long)])
def test_a_script_that_trains(tmp_path: Path, times: str) -> None:
    """Its functions are in no module that a worker could import; the callback ends each run after two steps of four.

    The first run is within a running event loop, the second in a thread.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", str(tmp_path), times], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("all is well\n")
