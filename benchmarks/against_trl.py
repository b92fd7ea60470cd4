"""A whole GRPO step, ours against TRL's GRPOTrainer: same model, prompts, group size, lengths, machine and hour.

    python -m benchmarks.against_trl MODEL_FOLDER [--trl-python PYTHON] [--out FILE.json]

TRL runs in an environment of its own, made in .venv-trl if no --trl-python is given. Both train all weights with the KL
term on, on one optimizer step a batch; every response is sampled to its full length. A step is generation, reward,
reference, update and, here, weight sync. The first step of each is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import machine, table, write
from grpo_dist.tasks.arithmetic import rows

ROOT = Path(__file__).parents[1]
TRL = ("trl==1.16.0", "transformers==5.19.*", "torch==2.13.0")
PROMPTS, N, RESPONSE_TOKENS, STEPS = 8, 8, 64, 3


def main() -> None:
    """Run both, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--trl-python", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/benchmarks/against_trl.json")
    arguments = parser.parse_args()
    python = arguments.trl_python or _make_environment(ROOT / ".venv-trl")
    messages = [row["prompt"] for row in rows("train")[: PROMPTS * STEPS]]
    work = {
        "model": str(arguments.model.absolute()),
        "messages": messages,
        "prompts": PROMPTS,
        "n": N,
        "response_tokens": RESPONSE_TOKENS,
        "steps": STEPS,
        "micro_batch": 8,
        "threads": machine()["threads"],
        "bf16": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        seconds = {"grpo_dist": _ours(work, Path(folder)), "TRL": _trl(work, python, Path(folder))}
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    found = [
        {"system": name, "seconds a step": medians[name], "TRL / it": medians["TRL"] / medians[name]}
        for name in medians
    ]
    title = f"GRPO step: {PROMPTS} prompts x {N} responses x {RESPONSE_TOKENS} tokens, KL on"
    sys.stdout.write(table(title, found))
    shown = {key: value for key, value in work.items() if key != "messages"}
    write(arguments.out, {"machine": machine(), "trl": TRL, "work": shown, "seconds": seconds, "medians": medians})


def _ours(work: dict[str, Any], folder: Path) -> list[float]:
    """Seconds of each step, from the run's own metrics."""
    data = folder / "train.jsonl"
    lines = [
        {"data_source": "bench", "prompt": prompt, "reward_model": {"ground_truth": ""}} for prompt in work["messages"]
    ]
    data.write_text("\n".join(map(json.dumps, lines)))
    overrides = [
        f"actor_rollout_ref.model.path={work['model']}",
        f"data.train_files={data}",
        f"custom_reward_function.path={ROOT / 'benchmarks/trl_reward.py'}",
        "custom_reward_function.name=reward",
        "cluster=cpu",
        f"data.train_batch_size={work['prompts']}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={work['prompts']}",
        f"actor_rollout_ref.rollout.n={work['n']}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "data.max_prompt_length=256",
        f"data.max_response_length={work['response_tokens']}",
        f"trainer.total_training_steps={work['steps']}",
        "trainer.save_freq=-1",
        "trainer.export_hf_model=false",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder / 'run'}",
    ]
    subprocess.run([sys.executable, "-m", "grpo_dist.main", *overrides], cwd=ROOT, check=True)
    metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [row["timing_s/step"] for row in metrics if "timing_s/step" in row]


def _trl(work: dict[str, Any], python: Path, folder: Path) -> list[float]:
    """Seconds of each step, by TRL's own callbacks."""
    file = folder / "work.json"
    file.write_text(json.dumps(work))
    command = [str(python), str(ROOT / "benchmarks/trl_steps.py"), str(file)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])["seconds"]


def _make_environment(folder: Path) -> Path:
    """TRL's environment: made once."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *TRL], check=True)
    return python


if __name__ == "__main__":
    main()
