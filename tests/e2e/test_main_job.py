"""The main job, whole: Ray, FSDP2 on gloo, vLLM, the built-in model. Each run costs about a minute."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from grpo_dist.assets import resolve_model_path
from grpo_dist.tracking.jsonl import read_metrics
from tests.chaos.runs import STEPS, Outcome, train
from tests.config.read_back import read_back
from tests.messages import says
from tests.observed import assert_gone, command_line
from tests.trainer.metrics_page import PAGE, undocumented

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

SMALL = [
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "data.val_max_samples=64",
    "ray_kwargs.ray_init.address=local",
]


def command(run_dir: Path, *overrides: str) -> list[str]:
    local = f"trainer.default_local_dir={run_dir}"
    return [sys.executable, "-m", "grpo_dist.main", "algorithm.adv_estimator=grpo", local, *SMALL, *overrides]


def descendants(process: psutil.Process) -> set[psutil.Process]:
    try:
        return {process, *process.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def run_in_training(tmp_path: Path, *overrides: str) -> Iterator[tuple[subprocess.Popen, Path, set[psutil.Process]]]:
    """A run that has finished its first step: the process, its log, and its whole family."""
    log = tmp_path / "log"
    arguments = command(tmp_path / "run", *overrides)
    with log.open("w") as stream:
        # a background job of a script has SIGINT ignored, and its children inherit that
        run = subprocess.Popen(
            arguments, stderr=stream, stdout=stream, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        )
    try:
        deadline = time.monotonic() + 400
        while "step 1/" not in log.read_text():
            assert run.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield run, log, descendants(psutil.Process(run.pid))
    finally:
        run.kill()


def test_metrics_have_each_step_once(main_run: Outcome) -> None:
    rows = main_run.metrics()
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    step = rows[1]
    for name in ("critic/score/mean", "actor/loss", "actor/grad_norm", "response_length/mean", "perf/throughput"):
        assert name in step
    assert step["actor/kl_loss"] < rows[-1]["actor/kl_loss"], "the policy leaves the reference"
    assert rows[3]["actor/kl_loss"] > 1e-5
    assert all(row["training/weight_version"] == row["step"] for row in rows[1:])
    assert f"step {STEPS}/{STEPS}" in main_run.log
    assert "validation accuracy" in main_run.log
    says(main_run.log, "2 actor, 1 rollout, 1 ref, 1 reward")


def test_the_run_is_healthy_and_its_metrics_are_explained(main_run: Outcome) -> None:
    rows = main_run.metrics()
    health = {name: value for row in rows for name, value in row.items() if name.startswith("health/") and value}
    assert health == {}
    assert "health/grad_norm" in rows[-1]
    assert undocumented({name for row in rows for name in row} - {"step"}, PAGE.read_text()) == []


def test_trainer_and_engine_agree_on_log_probs(main_run: Outcome) -> None:
    """fp32 on both sides, after every weight sync: a stale or half-loaded engine would differ by orders more."""
    rows = main_run.metrics()[1:]
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows)
    assert rows[0]["training/agreement/mean"] < 1e-5, "before the first update"
    assert ("training/agreement/mean" in rows[1], rows[0]["health/agreement"]) == (False, 0)
    says(main_run.log, "log-probs", f"{rows[0]['training/agreement/mean']:.2g} nats", 0.0001)


def test_run_directory(main_run: Outcome) -> None:
    run_dir = main_run.run_dir
    assert read_back((run_dir / "config.yaml").read_text()).trainer.total_training_steps == STEPS
    rows = [json.loads(line) for line in (run_dir / f"rollouts/{STEPS}.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * 4
    assert list(run_dir.glob("tensorboard/*tfevents*"))
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text() == f"{STEPS}"


def slices(trace: dict) -> dict[str, list[tuple[float, float]]]:
    """Start and end of the slices by name, in microseconds since 1970."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in (each for each in trace["traceEvents"] if each["ph"] == "X"):
        start = trace["baseTimeNanoseconds"] / 1000 + event["ts"]
        found.setdefault(event["name"], []).append((start, start + event["dur"]))
    return found


def test_a_step_is_profiled_on_all_roles(main_run: Outcome) -> None:
    """Both actor ranks at once, the reference, vLLM, and Ray's timeline, whose call holds what a rank says of it."""
    assert [path.name for path in (main_run.run_dir / "profiles").iterdir()] == ["step_2"]
    files = sorted((main_run.run_dir / "profiles/step_2").iterdir())
    traces = {path.name.removesuffix(".json.gz"): json.loads(gzip.decompress(path.read_bytes())) for path in files}
    assert list(traces) == ["actor_rank0", "actor_rank1", "ray", "ref_rank0", "rollout_rank0"]
    timeline, actor, engine = (slices(traces[name]) for name in ("ray", "actor_rank0", "rollout_rank0"))
    assert {"aten::mm", "FSDP::pre_backward", "gloo:all_gather", "update", "export_weights"} <= actor.keys()
    assert {"aten::mm", "compute_log_probs"} <= slices(traces["ref_rank0"]).keys()
    assert "aten::embedding" in engine
    assert any("attention" in name for name in engine)
    assert any(name.startswith("execute_context") for name in engine)
    assert {"update", "export_weights", "compute_log_probs"} <= timeline.keys()
    threads = {each["args"]["name"] for each in traces["ray"]["traceEvents"] if each["name"] == "thread_name"}
    assert {"actor rank 0", "actor rank 1", "ref rank 0", "rollout rank 0", "reward rank 0"} <= threads
    (start, end), slack = actor["update"][0], 5e4  # of clocks that are set meanwhile
    assert any(start > called - slack and end < answered + slack for called, answered in timeline["update"])
    assert "trainer.profile_steps" not in main_run.log.replace("trainer.profile_steps=[2]", ""), "no profile has failed"


def test_trackers_have_what_the_run_has(main_run: Outcome) -> None:
    """Prometheus may not have asked yet when so short a run ends; it is said where to ask."""
    from grpo_dist.tracking.mlflow import MlflowClient

    client = MlflowClient((main_run.run_dir / "mlflow/mlruns").as_uri())
    run_id = (main_run.run_dir / "mlflow/run_id").read_text().strip()
    assert client.get_run(run_id).info.status == "FINISHED"
    history = client.get_metric_history(run_id, "critic/score/mean")
    assert [(metric.step, metric.value) for metric in history] == main_run.rewards()
    name = (main_run.run_dir / "trackio/run_id").read_text().strip()
    (database,) = main_run.run_dir.parents[1].glob("trackio/*.db")
    with sqlite3.connect(database) as connection:
        (count,) = connection.execute("SELECT COUNT(DISTINCT step) FROM metrics WHERE run_name = ?", [name]).fetchone()
    assert count == STEPS + 1
    assert re.search(r"Prometheus: http://127\.0\.0\.1:\d+/metrics", main_run.log)
    assert "off for the rest of the run" not in main_run.log


def test_the_trained_model_loads(main_run: Outcome) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_dist.assets import resolve_model_path

    folder = main_run.run_dir / "huggingface"
    trained = AutoModelForCausalLM.from_pretrained(folder)
    start = AutoModelForCausalLM.from_pretrained(resolve_model_path("builtin:tiny-qwen3"), dtype=torch.float32)
    changed = [
        (a - b).abs().max().item() for a, b in zip(trained.parameters(), start.parameters(), strict=True) if a.ndim > 1
    ]
    assert min(changed) > 0
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|im_end|>"


@pytest.mark.long
def test_a_checkpoint_is_validated_beside_the_record_of_its_training(main_run: Outcome, tmp_path: Path) -> None:
    """In a copy of its folder."""
    shutil.copytree(main_run.run_dir, tmp_path / "run")
    path = f"trainer.resume_from_path={tmp_path}/run/global_step_{STEPS}"
    outcome = train(tmp_path, [], "trainer.val_only=true", "trainer.resume_mode=resume_path", path)
    assert outcome.metrics() == main_run.metrics()
    row = read_metrics(tmp_path / "run/val_only/metrics.jsonl")[-1]
    found = {name: value for name, value in main_run.metrics()[-1].items() if name.startswith("val-core/")}
    assert found
    assert {name: row[name] for name in found} == found
    assert row["step"] == STEPS
    assert (tmp_path / f"run/val_only/validation/{STEPS}.jsonl").is_file()


@pytest.mark.long  # tests/chaos does so with SIGTERM
def test_ctrl_c_saves_and_leaves_no_process(tmp_path: Path) -> None:
    with run_in_training(tmp_path) as (run, log, family):
        os.kill(run.pid, signal.SIGINT)
        assert run.wait(120) == 128 + signal.SIGINT, log.read_text()[-2000:]
        assert_gone(family)
    step = (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text()
    says(log.read_text(), f"{tmp_path}/run/global_step_{step}", "grpo-dist", "algorithm.adv_estimator=grpo")


@pytest.mark.long  # tests/chaos kills one in a run that goes on
def test_a_killed_actor_rank_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with run_in_training(tmp_path, "trainer.max_actor_restarts=0") as (run, log, family):
        next(p for p in family if "ActorWorker" in command_line(p)).kill()
        assert run.wait(60) == 1, log.read_text()[-2000:]
        says(log.read_text(), "error: actor worker", "died")
        assert_gone(family)


@pytest.mark.long  # tests/workers/test_rollout.py runs episodes on an engine
def test_a_run_with_an_agent_loop(tmp_path: Path) -> None:
    """The calculator of examples/: calls are answered, and trainer and engine agree on what was sampled."""
    loop = Path(__file__).parents[2] / "examples" / "calculator" / "calculator.py"
    overrides = [
        f"actor_rollout_ref.rollout.agent.default_agent_loop={loop}:Calculator",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
    ]
    done = subprocess.run(command(tmp_path, *overrides), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for row in metrics(tmp_path)[-2:]:
        assert (row["num_turns/min"], row["num_turns/max"] >= 4) == (1, True)
        assert row["training/rollout_probs_diff_max"] < 0.01
    outputs = [json.loads(line)["output"] for line in (tmp_path / "rollouts" / "2.jsonl").read_text().splitlines()]
    sums = [re.fullmatch(r"(\d)\+(\d)=(\d+)", output.split()[0]) for output in outputs if "=" in output.split()[0]]
    assert len(sums) > 10
    assert all(int(found[1]) + int(found[2]) == int(found[3]) for found in sums if found)


TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools[0].function.name }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHECK = '''
import json


def check(answer: int):
    """Look at an answer.

    Args:
        answer: The answer.
    """
    return f"{answer % 10}?"


def parse(text):
    found = text.rpartition("#### ")[2]
    return [("check", json.dumps({"answer": found}))] if found else []
'''


@pytest.mark.long
def test_a_run_with_tools(tmp_path: Path) -> None:
    """Whatever the policy says is a call; trainer and engine agree on what was sampled behind the tool's answer."""
    model = shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), tmp_path / "model")
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    (tmp_path / "mine.py").write_text(CHECK)
    agent = "actor_rollout_ref.rollout.agent"
    overrides = [
        f"actor_rollout_ref.model.path={model}",
        f"{agent}.default_agent_loop=tool_agent",
        f"{agent}.agent_kwargs={{tools: ['{tmp_path}/mine.py:check'], tool_parser: '{tmp_path}/mine.py:parse'}}",
        f"{agent}.max_assistant_turns=2",
        "actor_rollout_ref.actor.observation_coeff=0.5",
        "actor_rollout_ref.actor.fsdp_config.dtype=fp32",
        "actor_rollout_ref.rollout.dtype=fp32",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
    ]
    done = subprocess.run(command(tmp_path, *overrides), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for row in metrics(tmp_path)[-2:]:
        assert row["training/rollout_probs_diff_max"] < 0.01
        assert 1 < row["reward_extra/tool_calls/mean"] <= 2
    surprises = [row["actor/observation_loss"] for row in metrics(tmp_path)[-2:]]
    assert surprises[1] < surprises[0], "the policy learns what the tool answers"
    shown = [json.loads(line) for line in (tmp_path / "rollouts" / "2.jsonl").read_text().splitlines()]
    assert all(row["input"].startswith("system\ncheck\nuser\n") for row in shown)
    called = [row["parts"] for row in shown if "parts" in row]  # those to which a tool has answered
    pairs = [(parts[0][1], re.fullmatch(r"\ntool\n(\d)\?\nassistant\n", parts[1][1])) for parts in called]
    answered = [(said, found[1]) for said, found in pairs if found]  # others had no number, or no room
    assert len(answered) > len(shown) / 2
    assert all(said.endswith(digit) for said, digit in answered)
