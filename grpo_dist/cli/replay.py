"""`grpo-dist replay RUN_DIR STEP` computes a recorded step again, and names the first number that differs.

With key=value it tells what another config would have pushed on the responses of that step, or of `--steps A:B`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from grpo_dist.algorithms.counterfactual import DRAWS, SEED, verdict, with_intervals
from grpo_dist.assets import expanded
from grpo_dist.cli.arguments import add_shared, command_parser
from grpo_dist.config.run_code import FLAG
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto
from grpo_dist.terminal import show
from grpo_dist.tracking.jsonl import METRICS, ROLLOUTS
from grpo_dist.tracking.rollouts import recorded_steps
from grpo_dist.trainer.recorded_step import SCORE_TOLERANCE, Difference, Recorded, first_difference, read_recorded

if TYPE_CHECKING:
    from grpo_dist.roles.reward import RewardWorker

# Numbers that are computed on another machine, or by the engine on GPU, differ by rounding.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}


def main(arguments: Sequence[str]) -> int:
    """Replay a step, or compare another config on several; 1 if a number differs."""
    options = _parser().parse_intermixed_args(arguments)
    if options.steps and options.step is not None:
        options.overrides.insert(0, str(options.step))  # argparse takes the first one for STEP
    if not (options.overrides if options.steps else isinstance(options.step, int)):
        raise ConfigError("give a STEP to compute again; --steps is for another config, key=value")
    if options.steps:
        return _compare(options)
    from grpo_dist.trainer.replay import rescore, retarget, reward_worker  # Ray: seconds

    recorded = read_recorded(expanded(options.run_dir), options.step, tuple(options.overrides), trust=options.trust)
    if recorded.ran is not None:
        return _compare(options)
    with reward_worker(recorded.config) as worker:
        scores, _ = rescore(recorded, worker)
        same = _tell("rewards", recorded, scores, SCORE_TOLERANCE)
        same = same and _tell("advantages", recorded, retarget(recorded, worker, scores), 1e-4)
    if same and not options.no_update:
        same = _update(recorded, options.update)
    return 0 if same else 1


def _tell(what: str, recorded: Recorded, computed: DataProto, tolerance: float) -> bool:
    difference = first_difference(recorded.data, computed, tolerance)
    columns = ", ".join(name for name in computed.columns() if name in recorded.data.columns())
    _write([f"{what}: as recorded ({columns})"] if difference is None else _differs(what, recorded, difference))
    return difference is None


def _update(recorded: Recorded, asked: bool) -> bool:
    """Compare the update, if there are weights to begin with."""
    from grpo_dist.trainer.replay import UPDATE_METRICS, metric_difference, reupdate

    config = recorded.config
    dtype = config.actor_rollout_ref.actor.fsdp_config.resolved_dtype(config.default_dtype)
    try:
        old, metrics = reupdate(recorded)
    except ConfigError as error:
        if asked:
            raise
        _write([f"update: not computed: {error}"])
        return True
    what = "log-probs before the update"
    if not old.columns():
        _write([f"{what}: not compared: algorithm.rollout_correction.bypass_mode=true takes the sampler's"])
    elif not _tell(what, recorded, old, TOLERANCE[dtype]):
        return False
    if recorded.only_critic_learned:
        warmup = config.trainer.critic_warmup
        _write([f"update: none of the policy (trainer.critic_warmup={warmup}); the critic's is not computed again"])
        return True
    if not any(name in recorded.metrics for name in UPDATE_METRICS):
        _write([f"update: not compared: step {recorded.step} has no metrics in {recorded.run_dir}/{METRICS}"])
        return True
    difference = metric_difference(recorded.metrics, metrics, TOLERANCE[dtype])
    if difference is not None:
        _write(_differs("update", recorded, difference))
        return False
    shown = (f"{name} {metrics[name]:.4g}" for name in UPDATE_METRICS if name in metrics and name in recorded.metrics)
    _write([f"update: as recorded, up to {TOLERANCE[dtype]:g} ({dtype}): {', '.join(shown)}"])
    return True


def _differs(what: str, recorded: Recorded, difference: Difference) -> Iterator[str]:
    where = ""
    if difference.row is not None:
        where = f", response {difference.row} ({recorded.data['uid'][difference.row]})"
        where += "" if difference.token is None else f", token {difference.token}"
    yield f"{what}: the first difference is in {difference.name}{where}"
    yield f"  recorded {difference.recorded:.9g}"
    yield f"  computed {difference.computed:.9g}"


def _compare(options: argparse.Namespace) -> int:
    """Tell what another config would have pushed."""
    from grpo_dist.trainer.replay import loss_is_another, reward_worker

    run_dir, (first, last) = expanded(options.run_dir), options.steps or (options.step, options.step)
    known = recorded_steps(run_dir) or [0]
    first, last = first or known[0], last or known[-1]
    if options.steps and not known[0] <= first <= last <= known[-1]:
        raise ConfigError(f"--steps {first}:{last}: {run_dir / ROLLOUTS} has the steps {known[0]}:{known[-1]}")
    table, notes, sums_by_unit = [], [], dict[str, list[np.ndarray]]()
    with ExitStack() as stack:
        worker = None
        for step in range(first, last + 1):
            recorded = read_recorded(run_dir, step, tuple(options.overrides), trust=options.trust)
            worker = worker or stack.enter_context(reward_worker(recorded.config))
            row, sums, own_notes = _compared(recorded, worker, options)
            table.append(row | _figures(sums)[1])
            notes += [f"step {step}: {note}" for note in own_notes]
            for unit, part in sums.items():
                sums_by_unit.setdefault(unit, []).append(part)
    whole = {unit: np.concatenate(parts, 1) for unit, parts in sums_by_unit.items()}
    in_all, shown = _figures(whole)
    table.append({"step": "all"} | shown)
    interval = f"in brackets: 95 % intervals by {DRAWS} draws of groups (cosine: of mini-batches), seed {SEED}"
    _write([*_lines(table), interval, *notes, verdict(whole, in_all, by_gradient=loss_is_another(recorded))])
    return 0


def _compared(
    recorded: Recorded, worker: RewardWorker, options: argparse.Namespace
) -> tuple[dict[str, str], dict[str, np.ndarray], list[str]]:
    """The first columns of a step's row, its sums by unit, and what is left out, and why."""
    from grpo_dist.trainer.replay import gradient_products, rescore, retarget, target_sums

    scores, failures = rescore(recorded, worker)
    before, after = recorded.data["score"], scores["score"]
    moved = ((before - after).abs() > SCORE_TOLERANCE) | (before.isnan() != after.isnan())
    row = {"step": str(recorded.step), "changed scores": f"{int(moved.sum())} of {len(before)}"}
    row["mean score"] = " -> ".join(f"{float(column.nanmean()):.4g}" for column in (before, after))
    notes = [f"the function failed on {len(failures)}: {failures[0].splitlines()[0]}"] if failures else []
    sums: dict[str, np.ndarray] = {}
    try:
        targets = retarget(recorded, worker, scores)
        of_groups, without = target_sums(recorded, scores, targets)
        notes += [f"{without} of {len(before)} responses are left out: they have no score"] if without else []
        if not of_groups.size:
            return row, sums, notes
        sums["groups"] = of_groups
        if not options.no_update and (gradients := gradient_products(recorded, targets)).size:
            sums["mini-batches"] = gradients
    except ConfigError as error:
        if options.update:
            raise
        notes.append(f"{'no gradients' if sums else f'all {len(before)} responses are left out'}: {error}")
    return row, sums, notes


def _lines(table: Sequence[dict[str, str]]) -> Iterator[str]:
    names = list(dict.fromkeys(name for row in table for name in row))
    cells = [names, *([row.get(name, "-") for name in names] for row in table)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    yield from ("  ".join(map(str.rjust, row, widths)) for row in cells)


def _figures(sums: dict[str, np.ndarray]) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The statistics of all units, as numbers and as they are shown."""
    statistics = {name: value for unit in sums for name, value in with_intervals(unit, sums[unit]).items()}
    shown = {}
    for name, (value, low, high) in statistics.items():
        digits = 0 if name.endswith(("groups", "size")) else 2
        interval = "" if name.endswith("groups") or low != low else f" [{low:.{digits}f}, {high:.{digits}f}]"
        shown[name.replace("_", " ")] = f"{value:.{digits}f}{interval}"
    return statistics, shown


def _write(lines: Sequence[str] | Iterator[str]) -> None:
    show("\n".join(lines) + "\n")


def _step(text: str) -> int | str:
    return text if "=" in text else int(text)  # a key=value, where --steps is in its place


def _range(text: str) -> tuple[int, ...]:
    first, last = text.split(":")
    return int(first or 0), int(last or 0)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "replay",
        "Compute a recorded step again, on CPU: rewards, advantages and, where there is a checkpoint of "
        "the step before, the update. Names the first number that differs (exit code 1). With key=value, such as "
        "another custom_reward_function.path, it tells what that would have pushed on the same responses.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("step", metavar="STEP", type=_step, nargs="?", help="a step of rollouts/")
    parser.add_argument("--steps", metavar="A:B", type=_range, help="with key=value, in place of STEP: A to B")
    add_shared(parser, "overrides", FLAG)
    update = parser.add_mutually_exclusive_group()
    update.add_argument("--update", action="store_true", help="an update that cannot be computed again is an error")
    update.add_argument("--no-update", action="store_true", help="rewards and advantages alone")
    return parser
