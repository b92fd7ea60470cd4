"""A whole GRPO step, ours against TRL's GRPOTrainer: same model, prompts, group size, lengths, machine and hour.

    python -m benchmarks.against_trl builtin           the main job: built-in model and task, with both learning curves
    python -m benchmarks.against_trl model FOLDER      8 prompts x 8 responses, each sampled to its full 64 tokens

TRL runs in an environment of its own, made in .venv-trl if no --trl-python is given. Its numbers are those of our
config: both train all weights with the KL term on, on one optimizer step a batch. A step is generation, reward,
reference, update and, here, weight sync; validation is not in it. The two sides run in turns, one after the other, and
the first step of each run is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import record
from grpo_dist.assets import resolve_model_path
from grpo_dist.config.processor import has_bf16
from grpo_dist.plan.commands import load_config
from grpo_dist.tasks.arithmetic import rows

ROOT = Path(__file__).parents[1]
TRL = ("trl==1.16.0", "transformers==5.19.*", "torch==2.13.0")
OURS, THEIRS = "grpo_dist", "TRL"
ENGINE_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
ACCURACY = "val-core/arithmetic/acc/mean@1"
# Parts of our step, in their order: the first three are within `rollout`, where they overlap.
PHASES = ("gen", "reward", "ref", "rollout", "adv", "update_actor", "update_weights")
QUIET = (
    "cluster=cpu",
    "trainer.save_freq=-1",
    "trainer.export_hf_model=false",
    "trainer.resume_mode=disable",
)


@dataclass
class Work:
    """What both sides do: our overrides, and what our config does not say of TRL's run."""

    title: str
    overrides: Sequence[str]
    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    trl: dict[str, Any]


@dataclass
class Run:
    """What one run of one side showed; seconds and phases of its steps, without the first."""

    seconds: list[float]
    accuracy: dict[str, float] = field(default_factory=dict)
    phases: dict[str, list[float]] = field(default_factory=dict)


Runs = dict[str, dict[str, list[Run]]]  # by type and system, one for each round


def main() -> None:
    """Run both in turns, print the tables, write the record."""
    arguments = _arguments()
    python = arguments.trl_python or _make_environment(ROOT / ".venv-trl")
    found = record.begun()
    runs: Runs = {dtype: {OURS: [], THEIRS: []} for dtype in arguments.dtype}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.work == "builtin":
            work = builtin()
        else:
            work = model(arguments.folder.absolute(), Path(folder), arguments.micro_batch)
        for seed in range(1, arguments.rounds + 1):
            for dtype, sides in runs.items():
                print(f"round {seed} of {arguments.rounds}, {dtype}", file=sys.stderr)
                here = Path(folder) / f"{dtype}-{seed}"
                here.mkdir()
                overrides = [*work.overrides, *_dtype(dtype), f"trainer.seed={seed}"]
                sides[OURS].append(_ours(overrides, here))
                sides[THEIRS].append(_theirs(trl_work(work, overrides, bf16=dtype == "bf16"), python, here))
    tables = {"steps": steps(runs), "phases": phases(runs), "accuracy": accuracy(runs)}
    titles = (
        work.title,
        "our step by phase, median seconds (`rollout` holds those before it, which overlap)",
        "greedy accuracy",
    )
    for title, each in zip(titles, tables.values(), strict=True):
        if each:
            print(record.table(title, each))
    record.write(arguments.output, found | {"trl": TRL, "runs": _plain(runs)} | tables, ratios(arguments.work, runs))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    works = parser.add_subparsers(dest="work", required=True)
    for name, rounds in (("builtin", 3), ("model", 1)):
        each = works.add_parser(name)
        if name == "model":
            each.add_argument("folder", type=Path, metavar="FOLDER")
            each.add_argument("--micro-batch", type=int, default=8, help="sequences of one, on both sides")
        each.add_argument("--dtype", default="fp32,bf16" if has_bf16() else "fp32", help="fp32, bf16 or both")
        each.add_argument("--rounds", type=int, default=rounds)
        each.add_argument("--trl-python", type=Path)
        each.add_argument("--output", type=Path, default=ROOT / f"outputs/benchmarks/against_trl_{name}.json")
    arguments = parser.parse_args()
    arguments.dtype = arguments.dtype.split(",")
    if wrong := set(arguments.dtype) - ENGINE_DTYPES.keys():
        parser.error(f"--dtype: {', '.join(wrong)}; there are {', '.join(ENGINE_DTYPES)}")
    if "bf16" in arguments.dtype and not has_bf16():
        parser.error("--dtype bf16: this processor has no bf16 instructions, which makes both sides many times slower")
    return arguments


def builtin() -> Work:
    """The main job's own config, for 15 steps. TRL is fastest with the batch in one micro-batch."""
    trl = {"reward": "right_sum", "full_length": False, "micro_batch": 256}
    overrides = [*QUIET, "trainer.test_freq=5", "trainer.total_training_steps=15"]
    return Work("the built-in job", overrides, _questions("train"), _questions("validation"), trl)


def model(path: Path, folder: Path, micro_batch: int, *, prompts: int = 8, steps: int = 3) -> Work:
    """A model of the user's, on questions of the built-in task."""
    train = _questions("train")[: prompts * steps]
    data = folder / "train.jsonl"
    lines = [
        {"data_source": "bench", "prompt": row["prompt"], "reward_model": {"ground_truth": row["answer"]}}
        for row in train
    ]
    data.write_text("\n".join(map(json.dumps, lines)))
    overrides = [
        *QUIET,
        f"actor_rollout_ref.model.path={path}",
        f"data.train_files={data}",
        f"custom_reward_function.path={ROOT / 'benchmarks/trl_reward.py'}",
        "custom_reward_function.name=distinct",
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro_batch}",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "data.max_prompt_length=256",
        "data.max_response_length=64",
        f"trainer.total_training_steps={steps}",
    ]
    trl = {"reward": "distinct", "full_length": True, "micro_batch": micro_batch}
    return Work(f"{path.name}, every response at its full length", overrides, train, [], trl)


def _questions(split: str) -> list[dict[str, Any]]:
    return [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in rows(split)]


def _dtype(name: str) -> list[str]:
    """All passes in a type; on both sides the optimizer updates float32 weights."""
    sections = ("actor.fsdp_config.dtype", "ref.fsdp_config.dtype")
    passes = [f"actor_rollout_ref.{section}={name}" for section in sections]
    return [*passes, f"actor_rollout_ref.rollout.dtype={ENGINE_DTYPES[name]}"]


def trl_work(work: Work, overrides: Sequence[str], *, bf16: bool) -> dict[str, Any]:
    """What trl_steps.py reads: the numbers of our config, under its names."""
    config, _ = load_config(list(overrides))
    roles = config.actor_rollout_ref
    return work.trl | {
        "model": resolve_model_path(roles.model.path),
        "train": work.train,
        "validation": work.validation,
        "validate_every": config.trainer.test_freq,
        "prompts": config.data.train_batch_size,
        "n": roles.rollout.n,
        "response_tokens": config.data.max_response_length,
        "temperature": roles.rollout.temperature,
        "steps": config.trainer.total_training_steps,
        "lr": roles.actor.optim.lr,
        "weight_decay": roles.actor.optim.weight_decay,
        "kl_loss_coef": roles.actor.kl_loss_coef,
        "max_grad_norm": roles.actor.grad_clip,
        "seed": config.trainer.seed,
        "threads": record.machine()["threads"],
        "bf16": bf16,
    }


def _ours(overrides: Sequence[str], folder: Path) -> Run:
    """The run's own metrics."""
    command = [sys.executable, "-m", "grpo_dist.main", *overrides, f"trainer.default_local_dir={folder / 'run'}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return read_metrics((folder / "run/metrics.jsonl").read_text())


def read_metrics(text: str) -> Run:
    """A run of ours by its metrics.jsonl."""
    lines = [json.loads(line) for line in text.splitlines()]
    timed = [line for line in lines if "timing_s/step" in line][1:]
    return Run(
        [line["timing_s/step"] for line in timed],
        {str(line["step"]): line[ACCURACY] for line in lines if ACCURACY in line},
        {name: [line[f"timing_s/{name}"] for line in timed if f"timing_s/{name}" in line] for name in PHASES},
    )


def _theirs(work: dict[str, Any], python: Path, folder: Path) -> Run:
    """TRL's own callbacks."""
    file = folder / "work.json"
    file.write_text(json.dumps(work))
    command = [str(python), str(ROOT / "benchmarks/trl_steps.py"), str(file)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(output.strip().splitlines()[-1])
    return Run(found["seconds"][1:], found["accuracy"])


def _make_environment(folder: Path) -> Path:
    """TRL's environment: made once."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *TRL], check=True)
    return python


def steps(runs: Runs) -> list[dict[str, Any]]:
    """Seconds a step of each side; the ratios are TRL's seconds over the row's."""
    found = []
    for dtype, sides in runs.items():
        seconds = {side: [second for run in each for second in run.seconds] for side, each in sides.items()}
        best, median = min(seconds[THEIRS]), statistics.median(seconds[THEIRS])
        found += [
            {
                "type": dtype,
                "system": side,
                "steps": len(each),
                "best s": min(each),
                "median s": statistics.median(each),
                "TRL / it, best": best / min(each),
                "TRL / it, median": median / statistics.median(each),
            }
            for side, each in seconds.items()
        ]
    return found


def phases(runs: Runs) -> list[dict[str, Any]]:
    """Our step's parts, median seconds."""
    found = []
    for dtype, sides in runs.items():
        parts = {name: [second for run in sides[OURS] for second in run.phases[name]] for name in PHASES}
        whole = [second for run in sides[OURS] for second in run.seconds]
        medians = {name: statistics.median(each) for name, each in parts.items() if each}
        found.append({"type": dtype, **medians, "step": statistics.median(whole)})
    return found


def accuracy(runs: Runs) -> list[dict[str, Any]]:
    """Share of right answers by step, a row for each run."""
    return [
        {"type": dtype, "system": side, "seed": seed, **{f"step {step}": value for step, value in run.accuracy.items()}}
        for dtype, sides in runs.items()
        for side, each in sides.items()
        for seed, run in enumerate(each, 1)
        if run.accuracy
    ]


def ratios(work: str, runs: Runs) -> dict[str, float]:
    """TRL's seconds over ours."""
    ours = {row["type"]: row for row in steps(runs) if row["system"] == OURS}
    return {
        f"against_trl/{work} {dtype}, {way}": row[f"TRL / it, {way}"]
        for dtype, row in ours.items()
        for way in ("best", "median")
    }


def _plain(runs: Runs) -> dict[str, Any]:
    return {dtype: {side: [vars(run) for run in each] for side, each in sides.items()} for dtype, sides in runs.items()}


if __name__ == "__main__":
    main()
