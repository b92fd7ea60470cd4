"""Planted wrong ground truths: how many `grpo-dist audit` finds, and whether it helps to leave out what it names.

The built-in job trains on sums, of which a share has the ground truth of another sum, and its record is audited. Of
the 8,000 rows 25 steps see 800, once each; with --rows 256 they see each three times. Recall counts the wrong rows that
the run has seen. With --train it is trained again, from the start, without the rows of the list: the columns `all` and
`left` are the mean accuracy of the validations of both runs. Half a minute to two a run.

usage: python -m benchmarks.audit [--rows -1] [--shares 0 0.05] [--steps 25] [--seeds 1 ...] [--train]
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import grpo_dist
from benchmarks import record
from benchmarks.curriculum import half_interval
from grpo_dist.cli import entry
from grpo_dist.data.files import read_rows
from grpo_dist.tasks import arithmetic
from grpo_dist.tracking.metric_names import validation_accuracy


def planted(count: int, share: float, seed: int) -> list[dict[str, Any]]:
    """Sums, of whose ground truths a share is that of other sums; all rows where `count` is -1."""
    rng, rows = random.Random(seed), arithmetic.rows("train")[: None if count < 0 else count]
    for row in rng.sample(rows, round(share * len(rows))):
        right = row["reward_model"]["ground_truth"]
        while row["reward_model"]["ground_truth"] == right:
            row["reward_model"]["ground_truth"] = str(sum(arithmetic.draw_question(rng)))
    return rows


def is_wrong(prompt: str, truth: str) -> bool:
    """Whether a sum in a prompt has another value."""
    return sum(map(int, re.findall(r"\d+", prompt))) != int(truth)


def train(rows: list[dict[str, Any]], folder: Path, seed: int, steps: int, **keys: str) -> float:
    """A run in a folder; returns the mean accuracy of its validations but the first, which no step was before."""
    config = {"data": "arithmetic", "trainer.seed": seed, "trainer.default_local_dir": str(folder)}
    config |= {"trainer.total_training_steps": steps, "trainer.save_freq": -1, "trainer.export_hf_model": False}
    config |= {"trainer.console": False, "ray_kwargs.ray_init.address": "local", **keys}
    result = grpo_dist.train("tiny", train_dataset=rows, config=config)
    return statistics.mean(value for row in result.metrics[1:] if (value := validation_accuracy(row)) is not None)


def measure(options: argparse.Namespace, share: float, seed: int) -> dict[str, Any]:
    """One run, its audit, and maybe the run without the rows of the list."""
    rows = planted(options.rows, share, seed)
    with tempfile.TemporaryDirectory() as name:
        folder, listed = Path(name), Path(name, "listed.jsonl")
        everything = train(rows, folder / "all", seed, options.steps)
        if entry.main(["audit", str(folder / "all"), "--output", str(listed)]):
            raise SystemExit("the audit has failed")
        files = [str(path) for path in (folder / "all" / "rollouts").glob("*.jsonl")]
        seen = {row["row"]: is_wrong(row["input"], row["gts"]) for row in read_rows(files, key="rollouts")}
        accused = read_rows([str(listed)], key="listed") if listed.stat().st_size else []
        right = sum(is_wrong(row["prompt"], row["truth"]) for row in accused)
        found = {"share": share, "seed": seed, "seen": len(seen), "wrong": sum(seen.values()), "accused": len(accused)}
        found |= {"precision": right / len(accused) if accused else float("nan")}
        found |= {"recall": right / sum(seen.values()) if any(seen.values()) else float("nan"), "all": everything}
        if options.train:
            keys = {"data.exclude_rows": str(listed)} if accused else {}
            found["left"] = train(rows, folder / "left", seed, options.steps, **keys) if keys else everything
    return found


def main() -> None:
    """Measure each share and seed, then print all, and with --train the differences with their 95 % intervals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=-1)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.05])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--train", action="store_true")
    options = parser.parse_args()
    table = [measure(options, share, seed) for share in options.shares for seed in options.seeds]
    print(record.table(f"{options.steps} steps, {options.rows} rows", table))
    for share in options.shares if options.train else []:
        gains = [row["left"] - row["all"] for row in table if row["share"] == share]
        interval = f" +- {half_interval(gains):.3f}" if len(gains) > 1 else ""
        print(f"share {share:g}: without the listed rows {statistics.mean(gains):+.3f}{interval}")


if __name__ == "__main__":
    main()
