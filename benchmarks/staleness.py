"""What a model learns in equal updates from responses that are 0 to 64 updates old, with and without corrections.

usage: python -m benchmarks.staleness FILE.jsonl [--seeds 1 2 3 4 5] [--staleness 0 1 4 16 64] [--choices none TIS ...]
                                      [--smollm2 FOLDER] [--picture FILE.png]

The built-in model learns its sums (a cell takes about a minute on two quiet cores); --smollm2: the model in FOLDER
(scripts/make_smollm2.py) learns the same by a graded reward and without a reference (about five minutes). Cells in FILE
are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpo_dist
from benchmarks import record
from benchmarks.curriculum import half_interval
from benchmarks.study import measured
from grpo_dist.tracking.metric_names import SCORE, validation_accuracy

STALENESS = (0, 1, 4, 16, 64)
_CORRECTION = "algorithm.rollout_correction"
CHOICES: dict[str, dict[str, Any]] = {
    "none": {f"{_CORRECTION}.rollout_is": None},
    "TIS": {f"{_CORRECTION}.rollout_is": "token"},
    "sequence mask": {f"{_CORRECTION}.rollout_is": None, f"{_CORRECTION}.off_policy_mask_threshold": 0.05},
    "GSPO": {f"{_CORRECTION}.bypass_mode": True, "recipe": "gspo"},
    "M2PO": {f"{_CORRECTION}.rollout_is": None, f"{_CORRECTION}.m2_threshold": 0.04},
}
LAST = 10
N = 8
PER_UPDATE = {  # updates, prompts of each, and other keys
    "tiny": (80, 8, dict[str, Any]()),
    "smollm2": (
        24,
        4,
        {
            "custom_reward_function.path": "examples/custom_reward/reward.py",
            "data.max_response_length": 24,
            "actor_rollout_ref.actor.optim.lr": 3e-5,
            "actor_rollout_ref.actor.use_kl_loss": False,
            "model": "smollm2_135m",
        },
    ),
}


def run(choice: str, staleness: int, seed: int, smollm2: str | None) -> dict[str, Any]:
    """A run: mean reward of the last updates, validation after them, and how old its responses were.

    Validation is greedy: `accuracy` by the rule, `validation` the mean reward, which a graded function tells apart.
    """
    rewards, ages, validated, started = list[float](), list[float](), list[tuple[float, float]](), time.monotonic()

    def on_step(step: int, metrics: dict[str, float]) -> None:
        rewards.append(metrics[f"{SCORE}/mean"])
        ages.append(metrics.get("staleness/mean", 0.0))
        if (accuracy := validation_accuracy(metrics)) is not None:
            graded = measured(metrics, {"reward": "val-*/reward/mean@1"})
            validated.append((accuracy, graded.get("reward", accuracy)))

    updates, prompts, keys = PER_UPDATE["tiny" if smollm2 is None else "smollm2"]
    with tempfile.TemporaryDirectory() as folder:
        keys = keys | {"data.train_batch_size": prompts, "actor_rollout_ref.actor.ppo_mini_batch_size": prompts}
        of_run = {
            "total_training_steps": updates,
            "max_staleness": staleness,
            "test_freq": updates,
            "seed": seed,
            "default_local_dir": folder,
        }
        of_engine = {"n": N, "max_num_seqs": prompts * N * (staleness + 1)}  # all that may be under way at once
        config = {"data": "arithmetic", "cluster": "cpu", "actor_rollout_ref.rollout": of_engine, **keys}
        config |= CHOICES[choice] | {"trainer": of_run}
        grpo_dist.train(smollm2 or "tiny", config=config, callbacks=[on_step])
    return {
        "choice": choice,
        "max_staleness": staleness,
        "seed": seed,
        "reward": statistics.mean(rewards[-LAST:]),
        "accuracy": validated[-1][0],
        "validation": validated[-1][1],
        "staleness": statistics.mean(ages),
        "minutes": round((time.monotonic() - started) / 60, 2),
    }


def summary(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each cell the means over its seeds, with half the width of the reward's 95 % interval (nan for one seed)."""
    table = []
    for choice, staleness in itertools.product(CHOICES, STALENESS):
        cell = [each for each in results if (each["choice"], each["max_staleness"]) == (choice, staleness)]
        if cell:
            means = {name: statistics.mean(each[name] for each in cell) for name in ("reward", "accuracy", "staleness")}
            half = half_interval([each["reward"] for each in cell]) if len(cell) > 1 else float("nan")
            row = {"choice": choice, "max_staleness": staleness, "seeds": len(cell)}
            table.append(row | means | {"+-": half})
    return table


def draw(table: Sequence[dict[str, Any]], path: Path) -> None:
    """Reward by staleness, a line for each choice."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for choice in dict.fromkeys(row["choice"] for row in table):
        rows = [row for row in table if row["choice"] == choice]
        columns = {name: [row[name] for row in rows] for name in ("max_staleness", "reward", "+-")}
        axes.errorbar(columns["max_staleness"], columns["reward"], columns["+-"], label=choice, marker="o", capsize=3)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks(STALENESS, [str(each) for each in STALENESS])
    axes.set_xlabel("trainer.max_staleness")
    axes.set_ylabel(f"reward of the last {LAST} updates")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Run what FILE lacks, then print all that it has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--staleness", type=int, nargs="+", default=STALENESS)
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=CHOICES)
    parser.add_argument("--smollm2", metavar="FOLDER")
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    results = [json.loads(line) for line in asked.file.read_text().splitlines()] if asked.file.exists() else []
    there = {(each["choice"], each["max_staleness"], each["seed"]) for each in results}
    for seed, staleness, choice in itertools.product(asked.seeds, asked.staleness, asked.choices):
        if (choice, staleness, seed) not in there:
            results.append(run(choice, staleness, seed, asked.smollm2))
            with asked.file.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
    table = summary(results)
    print(record.table("reward by staleness", table))
    if asked.picture is not None:
        draw(table, asked.picture)


if __name__ == "__main__":
    main()
