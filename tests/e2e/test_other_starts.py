"""Whole runs as others start them: from scripts and notebooks, command after command, from an environment."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.cli.entry import main
from grpo_dist.tasks import arithmetic
from grpo_dist.tracking.metric_names import validation_accuracy
from scripts.make_tiny_model import direct_response, operands
from tests.e2e.runs import metrics, rollouts

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
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


def run(*command: str | Path, cwd: Path = ROOT, program: str = sys.executable, **environment: str) -> None:
    """Run Python, or another program, with these arguments, as a user does."""
    env = os.environ | environment
    done = subprocess.run([program, *command], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.deep
@pytest.mark.parametrize("times", ["once", pytest.param("twice", marks=pytest.mark.long)])
def test_a_script_that_trains(tmp_path: Path, times: str) -> None:
    """By functions of no module, in a running event loop and in a thread; callbacks end runs after 2 of 4 steps."""
    (tmp_path / "script.py").write_text(SCRIPT)
    run("script.py", str(tmp_path), times, cwd=tmp_path)


# --- base, supervised fine-tuning, GRPO on its model ---------------------------------------------------------------
LOCAL = "ray_kwargs.ray_init.address=local"
COMMON = ("model=tiny", "data=arithmetic", "trainer.logger=[console]", "trainer.save_freq=-1", LOCAL)
MARGIN = 0.1


def accuracies(run_dir: Path) -> list[float]:
    """Of each validation, in order."""
    return [accuracy for row in metrics(run_dir) if (accuracy := validation_accuracy(row)) is not None]


@pytest.mark.long
def test_each_stage_takes_what_the_one_before_has_made(tmp_path: Path) -> None:
    """From random weights over hasty answers to solved sums; margins are wide, since processors round differently."""
    base, sft, grpo, answers = (tmp_path / name for name in ("base", "sft", "grpo", "answers.parquet"))
    rows = []
    for number, row in enumerate(arithmetic.rows("train")):
        answer = (direct_response if number % 3 else arithmetic.worked_answer)(*operands(row))
        rows.append({"messages": [*row["prompt"], {"role": "assistant", "content": answer}]})
    pq.write_table(pa.Table.from_pylist(rows), answers)
    run("scripts/make_tiny_model.py", "--untrained", str(base))
    train, to_grpo = ("-m", "grpo_dist.main", *COMMON), f"trainer.default_local_dir={grpo}"
    run(*train, f"actor_rollout_ref.model.path={base}", "trainer.val_only=true", to_grpo)
    (base_accuracy,) = accuracies(grpo / "val_only")
    run(
        *("-m", "grpo_dist", "sft", *COMMON, f"model.path={base}", "optim.lr=3e-3", f"data.train_files={answers}"),
        *("trainer.total_epochs=10", "trainer.val_before_train=false", "trainer.total_training_steps=1200"),
        *("trainer.test_freq=-1", "cluster.world_size=2", "cluster.num_threads_per_worker=1"),
        f"trainer.default_local_dir={sft}",
    )
    length = ("trainer.total_training_steps=20", "trainer.test_freq=20")
    run(*train, f"actor_rollout_ref.model.path={sft}/huggingface", *length, to_grpo)
    sft_accuracy, grpo_accuracy = accuracies(grpo)
    assert sft_accuracy > base_accuracy + MARGIN
    assert grpo_accuracy > sft_accuracy + MARGIN


ADDS = """
import re


def adds(messages):
    return f"#### {sum(map(int, re.findall('[0-9]+', messages[-1]['content'])))}"
"""


@pytest.mark.long  # installs verifiers
def test_the_built_in_model_learns_in_an_environment_of_verifiers(tmp_path: Path) -> None:
    example, accuracy = ROOT / "examples" / "verifiers", "val-core/additions/reward/mean@1"
    python, run_dir = tmp_path / "env" / "bin" / "python", tmp_path / "run"
    uv = str(Path(sys.executable).parent / "uv")
    run("venv", "--quiet", "--python", sys.executable, tmp_path / "env", program=uv)
    run("pip", "install", "--quiet", "--python", python, example, program=uv)
    env = {"GRPO_DIST_PYTHON": sys.executable, "VERIFIERS_PYTHON": str(python), "DATA_DIR": str(tmp_path / "rows")}
    run(
        *(example / "run.sh", f"trainer.default_local_dir={run_dir}", LOCAL, "trainer.seed=1", "trainer.test_freq=5"),
        *("trainer.save_freq=-1", "trainer.export_hf_model=false"),
        program="bash",
        **env,
    )
    rows = metrics(run_dir)
    validation = [row[accuracy] for row in rows if accuracy in row]
    assert validation[0] < 0.5
    assert validation[-1] > 0.8
    steps = [row for row in rows if row["step"]]
    rewards = [row["critic/score/mean"] for row in steps]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards
    assert all(row["reward_extra/characters/mean"] > 0 for row in steps)
    for row in (row for step in range(1, len(steps) + 1) for row in rollouts(run_dir, step)):
        a, b = map(int, re.findall(r"\d+", row["input"])[:2])
        found = re.search(r"#### (\d+)", row["output"])
        assert row["score"] == float(found is not None and int(found[1]) == a + b), row
    (tmp_path / "policy.py").write_text(ADDS)
    kwargs = f"{{play: 'grpo_dist.agents.verifiers_worker:play', python: '{python}'}}"
    given = [f"actor_rollout_ref.rollout.agent.agent_kwargs={kwargs}", f"data.train_files={tmp_path}/rows/train.jsonl"]
    given += ["actor_rollout_ref.rollout.agent.default_agent_loop=external", "data.max_prompt_length=64"]
    assert main(["check-env", f"--player={tmp_path}/policy.py:adds", "data.max_response_length=64", *given]) == 0


@pytest.mark.long
@pytest.mark.parametrize(("example", "source"), [("environment", "auction"), ("code", "code")])
def test_the_built_in_model_learns_by_a_class_and_by_tests(example: str, source: str, tmp_path: Path) -> None:
    folders = {name: str(tmp_path / name) for name in ("DATA_DIR", "MODEL_DIR", "START_DIR")}
    run(
        *(ROOT / "examples" / example / "run.sh", f"trainer.default_local_dir={tmp_path / 'run'}", LOCAL),
        *("trainer.total_training_steps=12", "trainer.test_freq=12"),
        program="bash",
        GRPO_DIST_PYTHON=sys.executable,
        **folders,
    )
    accuracy = f"val-core/{source}/acc/mean@1"
    first, last = [row[accuracy] for row in metrics(tmp_path / "run") if accuracy in row]
    assert last > first + 0.2
