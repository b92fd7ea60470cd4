"""Names (verl's) of the metrics that the console and the summary show, and the one number for validation."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from grpo_dist.errors import ConfigError
from grpo_dist.plugins.names import REWARD_EXTRA

if TYPE_CHECKING:
    from grpo_dist.config.schema_job import JobTrainerConfig, StopAtConfig

GLOBAL_STEP = "training/global_step"
"""The training step, verl's name, among the metrics of trackers in which it is no number of a row."""
SCORE, REWARDS = "critic/score", "critic/rewards"  # with /mean, /max and /min
REWARD = f"{SCORE}/mean"
KL_LOSS = "actor/kl_loss"
PPO_KL = "actor/ppo_kl"
RESPONSE_LENGTH = "response_length/mean"
CLIPPED = "response_length/clip_ratio"
ZERO_VARIANCE = "critic/zero_variance_groups"
THROUGHPUT = "perf/tokens_per_s"  # of all devices; verl's perf/throughput is per device
TIMING = "timing_s/"
STEP_TIME = "timing_s/step"
IDLE = "perf/idle/"
BESIDE_STEPS = ("testing", "save_checkpoint")  # phases that a step's time leaves out
_MEAN = "/mean"
VALIDATION, AUXILIARY = "val-core/", "val-aux/"
SUPERVISED_VALIDATION = "val/"
# Of models that train on rows with known answers, by what the console calls them.
SUPERVISED = {"loss": ("reward_model/loss", "sft/loss"), "accuracy": ("reward_model/accuracy",)}
# What says most about a validation of theirs, best first.
_JUDGED = tuple(SUPERVISED_VALIDATION + name for name in ("reward_model/accuracy", "sft/loss"))


class DistinctNames(dict[str, str]):
    """By metric, its name in a tracker that does not take all characters, or has a file for each.

    `plain` makes a name that the tracker takes, with room for a number, which the later one of two gets that would be
    equal, or one a folder above the other. `stored` are names that the tracker has from an earlier part of the run.
    """

    def __init__(self, plain: Callable[[str], str], stored: Iterable[str] = ()) -> None:
        self._plain, self._stored = plain, frozenset(stored)

    def __missing__(self, name: str) -> str:
        plain = self._plain(name)
        first, slash, rest = plain.partition("/")
        numbered = (f"{first}_{number}{slash}{rest}" for number in itertools.count(2))
        self[name] = next(each for each in itertools.chain([plain], numbered) if not self._is_taken(each))
        return self[name]

    def _is_taken(self, name: str) -> bool:
        others = (f"{other}/" for other in (*self.values(), *self._stored - {name}))
        return any(other.startswith(f"{name}/") or f"{name}/".startswith(other) for other in others)


def reward_parts(metrics: Mapping[str, float]) -> dict[str, float]:
    """The means of the functions that make up the reward, and of what they tell besides, by their names."""
    names = (name for name in metrics if name.startswith(REWARD_EXTRA) and name.endswith(_MEAN))
    return {name[len(REWARD_EXTRA) : -len(_MEAN)]: metrics[name] for name in names}


def is_loss(name: str) -> bool:
    """Tell if a metric is best where it is lowest."""
    return name.endswith("/loss")


def validation_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The validation accuracies among `metrics`: `val-core/SOURCE/acc/mean@N`, one per data source.

    Without `acc` it is `val-core/SOURCE/reward/mean@N`; without a mean, all metrics of `val-core/` that remain. Of a
    model that trains on rows with known answers it is their accuracy, or the loss.
    """
    for name in _JUDGED:
        if name in metrics:
            return {name: metrics[name]}
    names = [name for name in metrics if name.startswith(VALIDATION)]
    for marker in ("/acc/", "/mean@"):
        names = [name for name in names if marker in name] or names
    return {name: metrics[name] for name in names}


def validation_accuracy(metrics: Mapping[str, float]) -> float | None:
    """Mean of `validation_metrics` over the data sources; None when this step was not validated."""
    values = validation_metrics(metrics).values()
    return sum(values) / len(values) if values else None


def validation_clipped(metrics: Mapping[str, float]) -> float:
    """Share of the validation responses that were cut off, of the data source that has most; 0 without validation."""
    ends = "/truncated/mean"
    return max((v for name, v in metrics.items() if name.startswith(AUXILIARY) and name.endswith(ends)), default=0.0)


def why_it_ends(stop_at: StopAtConfig | None, metrics: Mapping[str, float]) -> str:
    """Say why the run ends after a step with these metrics (`trainer.stop_at`); "": it goes on."""
    if stop_at is None or stop_at.metric not in metrics:
        return ""
    name, limit, value = stop_at.metric, stop_at.value, metrics[stop_at.metric]
    if not (value <= limit if is_loss(name) else value >= limit):  # nan reaches nothing
        return ""
    return f"{name} is {value:.4g} and has reached trainer.stop_at.value={limit:g}"


def require_metrics(trainer: JobTrainerConfig, metrics: Collection[str]) -> None:
    """Check that validation produces the metrics that keys of `trainer` name; `metrics` has those of validation."""
    known = [metric for metric in metrics if metric.startswith((VALIDATION, AUXILIARY, SUPERVISED_VALIDATION))]
    for key, name in trainer.metrics_named.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
            near = near or [metric for metric in known if not metric.startswith(AUXILIARY)]
            raise ConfigError(
                f"trainer.{key}={name}: validation has no such metric; the closest are {', '.join(near) or 'none'}"
            )
