"""Tokens sampled until the built-in model solves its task, where most training prompts teach nothing.

Three quarters of them are sums of four digits, of which none is ever right, an eighth are sums without carries, most of
them right from the start, and an eighth are sums with carries. They are drawn in three ways: all in turn (uniform), so
but without groups with equal scores (algorithm.filter_groups), and by data.curriculum. Minutes a run.

usage: python -m benchmarks.curriculum [SEED ...]
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import grpo_dist
from benchmarks import record
from grpo_dist.tasks import arithmetic
from grpo_dist.tracking.metric_names import ZERO_VARIANCE, validation_accuracy

CHOICES = {"uniform": "", "filter_groups": "algorithm.filter_groups.enable", "curriculum": "data.curriculum.enable"}
GOAL, MOST_STEPS, PROMPTS, BATCH, N = 0.9, 150, 64, 8, 16
LR = "actor_rollout_ref.actor.optim.lr"  # half the built-in job's, so that the prompts are seen several times
T_95 = {
    2: 12.71,
    3: 4.30,
    4: 3.18,
    5: 2.78,
    6: 2.57,
    7: 2.45,
    8: 2.36,
    9: 2.31,
    10: 2.26,
}  # of Student's distribution, by the number of runs


def rows(count: int) -> list[dict[str, Any]]:
    """The mixture, in random order."""
    rng, kinds = random.Random(0), dict[bool, list[dict[str, Any]]]({True: [], False: []})
    for row in arithmetic.rows("train"):
        a, b = row["prompt"][0]["content"].removesuffix("=?").split("+")
        kinds[any(int(x) + int(y) > 9 for x, y in zip(a, b, strict=True))].append(row)
    hard = []
    for _ in range(count * 3 // 4):
        a, b = rng.randint(1000, 9999), rng.randint(1000, 9999)
        prompt = [{"role": "user", "content": arithmetic.question(a, b)}]
        hard.append({**kinds[True][0], "prompt": prompt, "reward_model": {"ground_truth": str(a + b)}})
    mixed = [*hard, *kinds[True][: count // 8], *kinds[False][: count // 8]]
    return rng.sample(mixed, len(mixed))


def run(choice: str, seed: int) -> dict[str, Any]:
    """Train until the goal is reached: steps and tokens until then, and the mean share of groups with equal scores."""
    tokens, shares = list[float](), list[float]()

    def on_step(step: int, metrics: dict[str, float]) -> bool:
        tokens.append(metrics.get("train/sampled_tokens", metrics["response_length/mean"] * BATCH * N))
        shares.append(metrics.get("train/filtered_groups", metrics[ZERO_VARIANCE]))
        return (validation_accuracy(metrics) or 0.0) >= GOAL

    with tempfile.TemporaryDirectory() as folder:
        of_batch = {"data.train_batch_size": BATCH, "actor_rollout_ref.actor.ppo_mini_batch_size": BATCH, LR: 5e-5}
        of_run = {"total_training_steps": MOST_STEPS, "test_freq": 1, "seed": seed, "default_local_dir": folder}
        config = {"data": "arithmetic", "cluster": "cpu", "actor_rollout_ref.rollout.n": N, **of_batch}
        config |= {"trainer": of_run} | ({CHOICES[choice]: True} if CHOICES[choice] else {})
        grpo_dist.train("tiny", train_dataset=rows(PROMPTS), config=config, callbacks=[on_step])
    return {"choice": choice, "steps": len(shares), "equal": statistics.mean(shares), "tokens": sum(tokens)}


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each choice the means, and that of its tokens by those of the first choice with the same seed.

    Behind `tokens` and `ratio` stands half the width of the 95 % interval of the mean.
    """
    table, first = [], [float(result["tokens"]) for result in runs if result["choice"] == runs[0]["choice"]]
    for choice in dict.fromkeys(result["choice"] for result in runs):
        results = [result for result in runs if result["choice"] == choice]
        columns = {name: [result[name] for result in results] for name in ("steps", "equal", "tokens")}
        ratios = [mine / its for mine, its in zip(columns["tokens"], first, strict=True)]
        means = {name: statistics.mean(values) for name, values in columns.items()}
        more = {
            "+-": half_interval(columns["tokens"]),
            "ratio": statistics.mean(ratios),
            "+- ratio": half_interval(ratios),
        }
        table.append({"choice": choice} | means | more)
    return table


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of 2 to 10 values."""
    return T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5


if __name__ == "__main__":
    seeds = [int(seed) for seed in sys.argv[1:]] or [1, 2, 3, 4, 5]
    print(record.table("tokens until the goal", summary([run(choice, seed) for seed in seeds for choice in CHOICES])))
