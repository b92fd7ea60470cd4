"""`grpo-dist replay RUN_DIR STEP` computes a recorded step again, and names the first number that differs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from grpo_dist.assets import expanded
from grpo_dist.cli.arguments import add_shared, command_parser
from grpo_dist.config.run_code import FLAG
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto
from grpo_dist.terminal import show
from grpo_dist.tracking.jsonl import METRICS
from grpo_dist.trainer.recorded_step import SCORE_TOLERANCE, Difference, Recorded, first_difference, read_recorded

# Numbers that are computed on another machine, or by the engine on GPU, differ by rounding.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}


def main(arguments: Sequence[str]) -> int:
    """Replay a step; 1 if a number differs."""
    options = _parser().parse_intermixed_args(arguments)
    from grpo_dist.trainer.replay import rescore, retarget, reward_worker  # Ray: seconds

    recorded = read_recorded(expanded(options.run_dir), options.step, tuple(options.overrides), trust=options.trust)
    with reward_worker(recorded.plan) as worker:
        scores = rescore(recorded, worker)
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
    dtype = recorded.plan.ranks("actor").model.compute_dtype
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


def _write(lines: Sequence[str] | Iterator[str]) -> None:
    show("\n".join(lines) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "replay",
        "Compute a recorded step again, on CPU: rewards, advantages and, where there is a checkpoint of "
        "the step before, the update. Names the first number that differs (exit code 1). key=value says what the "
        "run has not saved, or names code of it that you trust.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("step", metavar="STEP", type=int, help="a step of rollouts/")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="what the run has not saved (***)")
    add_shared(parser, FLAG)
    update = parser.add_mutually_exclusive_group()
    update.add_argument("--update", action="store_true", help="an update that cannot be computed again is an error")
    update.add_argument("--no-update", action="store_true", help="rewards and advantages alone")
    return parser
