"""The main job, whole: Ray, FSDP2 on gloo, vLLM, the built-in model. Each run costs about a minute."""

import gzip
import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_dist.assets import resolve_model_path
from grpo_dist.main import fork
from grpo_dist.report.rollouts import against
from grpo_dist.runs import read_run
from grpo_dist.tracking.base import tracker_ids
from grpo_dist.tracking.jsonl import read_metrics
from tests.chaos.runs import STEPS, Outcome
from tests.chaos.runs import train as train_main
from tests.config.read_back import read_back
from tests.e2e.runs import AGENT, rollouts, sized, train
from tests.messages import says
from tests.trainer.metrics_page import PAGE, undocumented

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

TWO_STEPS = [
    *("algorithm.adv_estimator=grpo", *sized(16), "data.val_max_samples=64"),
    *("trainer.total_training_steps=2", "trainer.val_before_train=false"),
]


def test_metrics_are_healthy_and_explained_and_trainer_and_engine_agree(main_run: Outcome) -> None:
    rows = main_run.metrics()
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for name in ("critic/score/mean", "actor/loss", "actor/grad_norm", "response_length/mean", "perf/throughput"):
        assert name in rows[1]
    assert rows[1]["actor/kl_loss"] < rows[-1]["actor/kl_loss"], "the policy leaves the reference"
    assert rows[3]["actor/kl_loss"] > 1e-5
    assert all(row["training/weight_version"] == row["step"] for row in rows[1:])
    assert f"step {STEPS}/{STEPS}" in main_run.log
    assert "validation accuracy" in main_run.log
    says(main_run.log, "2 actor, 1 rollout, 1 ref, 1 reward")
    assert [(row["step"], name) for row in rows for name in row if name.startswith("health/") and row[name]] == []
    assert "health/grad_norm" in rows[-1]
    assert undocumented({name for row in rows for name in row} - {"step"}, PAGE.read_text()) == []
    # fp32 on both sides, after every weight sync: a stale or half-loaded engine would differ by orders more.
    rows = main_run.metrics()[1:]
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows)
    assert rows[0]["training/agreement/mean"] < 1e-5, "before the first update"
    assert ("training/agreement/mean" in rows[1], rows[0]["health/agreement"]) == (False, 0)
    says(main_run.log, "log-probs", f"{rows[0]['training/agreement/mean']:.2g} nats", 0.0001)


def test_run_directory(main_run: Outcome) -> None:
    run_dir = main_run.run_dir
    assert read_back((run_dir / "config.yaml").read_text()).trainer.total_training_steps == STEPS
    assert len(rollouts(run_dir, STEPS)) == 4 * 4
    assert list(run_dir.glob("tensorboard/*tfevents*"))
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text() == f"{STEPS}"
    trained = AutoModelForCausalLM.from_pretrained(run_dir / "huggingface")
    start = AutoModelForCausalLM.from_pretrained(resolve_model_path("builtin:tiny-qwen3"), dtype=torch.float32)
    for one, other in zip(trained.parameters(), start.parameters(), strict=True):
        assert one.ndim == 1 or (one - other).abs().max() > 0
    assert AutoTokenizer.from_pretrained(run_dir / "huggingface").eos_token == "<|im_end|>"


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


@pytest.mark.deep
def test_a_fork_without_a_change_ends_as_its_run(main_run: Outcome, shared_ray: None, tmp_path: Path) -> None:
    own = f"trainer.default_local_dir={tmp_path}", "trainer.logger=mlflow"
    assert fork([str(main_run.run_dir), "--step", f"{STEPS - 2}", *own]) == 0
    for name in ("huggingface/model.safetensors", f"rollouts/{STEPS - 1}.jsonl", f"rollouts/{STEPS}.jsonl"):
        assert (tmp_path / name).read_bytes() == (main_run.run_dir / name).read_bytes()
    assert tracker_ids(tmp_path)["mlflow"] != tracker_ids(main_run.run_dir)["mlflow"]
    told = against(read_run(main_run.run_dir), read_run(tmp_path)).against
    assert (told["reward - first"], told["equal"], told["parted in step"]) == ("+0 [+0, +0]", "100%", "none")
    assert told["steps"] == f"{STEPS - 1} to {STEPS}"


@pytest.mark.long
def test_a_checkpoint_is_validated_beside_the_record_of_its_training(main_run: Outcome, tmp_path: Path) -> None:
    shutil.copytree(main_run.run_dir, tmp_path / "run")
    path = f"trainer.resume_from_path={tmp_path}/run/global_step_{STEPS}"
    outcome = train_main(tmp_path, [], "trainer.val_only=true", "trainer.resume_mode=resume_path", path)
    assert outcome.metrics() == main_run.metrics()
    row = read_metrics(tmp_path / "run/val_only/metrics.jsonl")[-1]
    found = {name: value for name, value in main_run.metrics()[-1].items() if name.startswith("val-core/")}
    assert found
    assert {name: row[name] for name in found} == found
    assert row["step"] == STEPS
    assert (tmp_path / f"run/val_only/validation/{STEPS}.jsonl").is_file()


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
    rows = train(
        tmp_path,
        *(*TWO_STEPS, f"actor_rollout_ref.model.path={model}", f"{AGENT}.default_agent_loop=tool_agent"),
        f"{AGENT}.agent_kwargs={{tools: ['{tmp_path}/mine.py:check'], tool_parser: '{tmp_path}/mine.py:parse'}}",
        *(f"{AGENT}.max_assistant_turns=2", "actor_rollout_ref.actor.observation_coeff=0.5"),
        *("actor_rollout_ref.actor.fsdp_config.dtype=fp32", "actor_rollout_ref.rollout.dtype=fp32"),
    )
    for row in rows:
        assert row["training/rollout_probs_diff_max"] < 0.01
        assert 1 < row["reward_extra/tool_calls/mean"] <= 2
    assert rows[1]["actor/observation_loss"] < rows[0]["actor/observation_loss"], "it learns what the tool answers"
    shown = rollouts(tmp_path, 2)
    assert all(row["input"].startswith("system\ncheck\nuser\n") for row in shown)
    called = [row["parts"] for row in shown if "parts" in row]  # those to which a tool has answered
    pairs = [(parts[0][1], re.fullmatch(r"\ntool\n(\d)\?\nassistant\n", parts[1][1])) for parts in called]
    answered = [(said, found[1]) for said, found in pairs if found]  # others had no number, or no room
    assert len(answered) > len(shown) / 2
    assert all(said.endswith(digit) for said, digit in answered)
