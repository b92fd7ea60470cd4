"""Whole runs of several arms with several seeds, compared where they have used equally much.

usage: python -m benchmarks.study STUDY.yaml FILE.jsonl [--seeds 1 2 ...] [--at-once 2] [--budget tokens=60000]
                                  [--picture FILE.png]

STUDY.yaml says what is compared; benchmarks/studies has four. Its keys:

    budget    {tokens: 200000}: where runs are compared; tokens, steps or seconds
    seeds     [1, 2, 3]
    measures  {NAME: PATTERN}: metrics of validations, whose mean is taken where several match
    tasks     {NAME: {}}: what the config says, or {NAME: {mixed_sums: 256}}: so many sums of mixed lengths as rows
    config    keys of every run, as on the command line
    arms      {NAME: KEYS}: what differs; others are compared with the first

All arms' keys, and code of your own that they name, are checked before the first run. Each run is a process of its
own and adds a line to FILE. Runs that are there are not made again, so that a study goes on where it was stopped. A
run ends with its first validation at or behind the budget; what it has reached is read off at the budget, on a
straight line between the validations around it. Intervals are those of the mean over seeds, 95 %, by bootstrap. An
arm separates from the first where Student's 95 % interval of their difference, seed by seed, does not hold 0: a
bootstrap of so few seeds is too narrow to decide by. Runs of one seed have the same prompts and the same noise:
`paired` is the variance of that difference over the one between independent seeds, in all that was measured so far.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import yaml

from benchmarks import curriculum, record
from grpo_dist.checks.all_checks import Checks, check_code
from grpo_dist.config.load import load_command
from grpo_dist.errors import ConfigError, GrpoDistError
from grpo_dist.plan.commands import GRPO
from grpo_dist.tracking.metric_names import STEP_TIME

UNITS = ("tokens", "steps", "seconds")
DRAWS, NAN = 10_000, float("nan")
Cell = tuple[str, str, int]  # task, arm, seed


def cells(study: Mapping[str, Any], seeds: Sequence[int]) -> Iterator[Cell]:
    """All runs of a study, seed by seed, so that what is there after a while compares all arms."""
    for seed, task, arm in product(seeds, study["tasks"], study["arms"]):
        yield task, arm, seed


def check(study: Mapping[str, Any]) -> None:
    """End with a message if an arm is no config, or names code that is not there or does not work."""
    for arm, keys in study["arms"].items():
        try:
            config, _ = load_command([*{**study.get("config", {}), **keys}.items()], GRPO)
            checks = Checks()
            check_code(config, checks, lambda line: None)
            checks.end()
        except ConfigError as error:
            raise SystemExit(f"arm {arm}: {error}") from None


def measured(metrics: Mapping[str, float], measures: Mapping[str, str]) -> dict[str, float]:
    """Return the study's measures of a validation; {} without one. `measures` has patterns of metrics by name."""
    found = {name: [v for key, v in metrics.items() if fnmatch(key, pattern)] for name, pattern in measures.items()}
    return {name: statistics.mean(values) for name, values in found.items() if values}


def sampled(metrics: Mapping[str, float]) -> float:
    """Return the tokens that a step has sampled, those that were thrown away among them."""
    prompt, response = metrics["prompt_length/mean"], metrics["response_length/mean"]
    return metrics.get("train/sampled_tokens", metrics["perf/total_num_tokens"] * response / (prompt + response))


def run(study: Mapping[str, Any], cell: Cell, budget: tuple[str, float]) -> dict[str, Any]:
    """Train until the budget is used: the validations on the way."""
    import grpo_dist

    (task, arm, seed), (unit, limit), started = cell, budget, time.monotonic()
    used, curve = dict.fromkeys(UNITS, 0.0), list[dict[str, float]]()

    def on_step(step: int, metrics: dict[str, float]) -> bool:
        used.update(steps=step, tokens=used["tokens"] + sampled(metrics), seconds=used["seconds"] + metrics[STEP_TIME])
        if reached := measured(metrics, study["measures"]):
            curve.append({**used, **reached})
        return bool(curve) and curve[-1][unit] >= limit

    with tempfile.TemporaryDirectory() as folder:
        config = {**study.get("config", {}), **study["arms"][arm]}
        config |= {"trainer.seed": seed, "trainer.default_local_dir": folder, "trainer.save_freq": -1}
        config |= {
            "trainer.console": False,
            "trainer.export_hf_model": False,
            "trainer.log_rollouts": False,
            "ray_kwargs.ray_init.address": "local",
        }
        rows = curriculum.rows(study["tasks"][task]["mixed_sums"]) if "mixed_sums" in study["tasks"][task] else None
        grpo_dist.train(train_dataset=rows, config=config, callbacks=[on_step])
    if not curve or curve[-1][unit] < limit:
        raise SystemExit(f"{_named(cell)}: ended before {limit:g} {unit}, or was never validated")
    return {"task": task, "arm": arm, "seed": seed, "minutes": (time.monotonic() - started) / 60, "curve": curve}


def at(curve: Sequence[Mapping[str, float]], name: str, unit: str, limit: float) -> float:
    """Return a measure when so much was used, between two validations on a straight line; nan: none are around it."""
    if exact := [point[name] for point in curve if point[unit] == limit]:
        return exact[0]
    for before, after in pairwise(curve):
        if before[unit] <= limit <= after[unit]:
            share = (limit - before[unit]) / (after[unit] - before[unit])
            return before[name] + share * (after[name] - before[name])
    return NAN


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean: the middle of the means of samples drawn with replacement; nan of none."""
    if not values:
        return NAN, NAN
    rng = random.Random(0)
    means = sorted(statistics.mean(rng.choices(values, k=len(values))) for _ in range(DRAWS))
    return means[int(0.025 * DRAWS)], means[int(0.975 * DRAWS)]


def summary(study: Mapping[str, Any], results: Sequence[Mapping[str, Any]], unit: str, limit: float) -> list[dict]:
    """For each task and arm: seeds, measures with intervals, whether it separates from the first arm, what it used."""
    table, first = [], next(iter(study["arms"]))
    for task, arm in product(study["tasks"], study["arms"]):
        found, base = (
            {r["seed"]: r["curve"] for r in results if (r["task"], r["arm"]) == (task, name)} for name in (arm, first)
        )
        row: dict[str, Any] = {"task": task, "arm": arm, "seeds": len(found)}
        for name in study["measures"]:
            values = {seed: at(curve, name, unit, limit) for seed, curve in found.items()}
            pairs = [values[seed] - at(base[seed], name, unit, limit) for seed in values if seed in base]
            low, high = bootstrap([*values.values()])
            row |= {name: statistics.mean(values.values()) if values else NAN, f"{name} low": low, f"{name} high": high}
            less = statistics.mean(pairs) if pairs else NAN
            half = curriculum.half_interval(pairs) if len(pairs) > 1 else NAN
            row |= {
                f"{name} less {first}": less,
                f"{name} +-": half,
                f"{name} paired": paired(found, base, name, unit, limit),
            }
            row |= {f"{name} separates": "one seed" if math.isnan(half) else "yes" if abs(less) > half else "no"}
        for other in (each for each in UNITS if each != unit):
            used = [at(curve, other, unit, limit) for curve in found.values()]
            row[other] = statistics.mean(used) if used else NAN
        table.append(row)
    return table


def paired(arm: Mapping[int, Any], first: Mapping[int, Any], name: str, unit: str, limit: float) -> float:
    """Return the variance of two arms' difference seed by seed over that of independent seeds, in all measurements up
    to the limit in which they differ; nan of one seed.
    """
    both = [(arm[seed], first[seed]) for seed in arm if seed in first]
    together, alone = 0.0, 0.0
    for points in zip(*(curve for pair in both for curve in pair), strict=False):
        values = [point[name] for point in points if point[unit] <= limit]
        pairs = [one - other for one, other in zip(values[::2], values[1::2], strict=True)]
        if len(values) == len(points) > 2 and any(pairs):
            together += statistics.variance(pairs)
            alone += statistics.variance(values[::2]) + statistics.variance(values[1::2])
    return together / alone if alone else NAN


def draw(study: Mapping[str, Any], results: Sequence[Mapping[str, Any]], unit: str, path: Path) -> None:
    """Each measure by what was used, a panel for each task and measure, the mean over seeds and all runs behind it."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = list(study["measures"])
    shape = len(study["tasks"]), len(names)
    figure, panels = pyplot.subplots(
        *shape, figsize=(5 * shape[1], 3.5 * shape[0]), squeeze=False, layout="constrained"
    )
    for (i, task), (j, name) in product(enumerate(study["tasks"]), enumerate(names)):
        for number, arm in enumerate(study["arms"]):
            curves = [r["curve"] for r in results if (r["task"], r["arm"]) == (task, arm)]
            for curve in curves:
                xs, ys = ([point[column] for point in curve] for column in (unit, name))
                panels[i][j].plot(xs, ys, color=f"C{number}", alpha=0.2)
            ends = [curve[-1][unit] for curve in curves if curve]
            grid = [min(ends) * k / 20 for k in range(21)] if ends else []
            means = [statistics.mean(at(curve, name, unit, x) for curve in curves) for x in grid]
            panels[i][j].plot(grid, means, color=f"C{number}", label=arm)
        panels[i][j].set(title=f"{task}: {name}", xlabel=unit)
    panels[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _named(cell: Sequence[Any]) -> str:
    task, arm, seed = cell
    return f"{task}, {arm}, seed {seed}"


def _in_a_process(arguments: argparse.Namespace, cell: Cell, budget: tuple[str, float]) -> dict[str, Any] | None:
    """The result of a run; None: it has failed, and its process has said why."""
    command = [sys.executable, "-m", "benchmarks.study", str(arguments.study), str(arguments.file)]
    command += ["--budget", f"{budget[0]}={budget[1]}", "--cell", json.dumps(cell)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] | None = None if done.returncode else json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Make the runs that FILE lacks, then print what all of them say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*")
    parser.add_argument("--at-once", type=int, choices=(1, 2), default=2)
    parser.add_argument("--budget", help="UNIT=AMOUNT of tokens, steps or seconds, instead of the study's own")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    study = yaml.safe_load(arguments.study.read_text())
    unit, amount = arguments.budget.split("=") if arguments.budget else next(iter(study["budget"].items()))
    if unit not in UNITS:
        parser.error(f"--budget {unit}: a run is measured in {', '.join(UNITS)}")
    budget = unit, float(amount)
    if arguments.cell:
        try:
            print(json.dumps(run(study, tuple(arguments.cell), budget)))
        except (GrpoDistError, KeyboardInterrupt) as error:
            sys.exit(f"{_named(arguments.cell)}: {error}")
        return
    check(study)
    results = [json.loads(line) for line in arguments.file.read_text().splitlines()] if arguments.file.exists() else []
    there = {(result["task"], result["arm"], result["seed"]) for result in results}
    seeds = study["seeds"] if arguments.seeds is None else arguments.seeds
    failed = list[Cell]()
    missing = [cell for cell in cells(study, seeds) if cell not in there]
    with ThreadPoolExecutor(arguments.at_once) as pool, arguments.file.open("a") as file:
        made = pool.map(lambda cell: _in_a_process(arguments, cell, budget), missing)
        for cell, result in zip(missing, made, strict=True):
            if result is None:
                failed.append(cell)
                continue
            print(f"{_named(cell)}: done, {result['minutes']:.1f} minutes", file=sys.stderr)
            results.append(result)
            file.write(json.dumps(result) + "\n")
            file.flush()
    print(record.table(f"at {budget[1]:g} {unit}", summary(study, results, *budget)))
    if arguments.picture is not None:
        draw(study, results, unit, arguments.picture)
    if failed:
        sys.exit(f"these runs have failed, and the next call makes them again: {failed}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command makes the runs that are missing")
