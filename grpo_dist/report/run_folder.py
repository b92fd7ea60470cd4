"""Reads what a run has written into its folder: metrics, config, broken health rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_dist.config.keys import flatten
from grpo_dist.config.schema_health import HealthConfig
from grpo_dist.errors import CheckpointError, ConfigError
from grpo_dist.redact import redact
from grpo_dist.tracking import metric_names
from grpo_dist.tracking.jsonl import FILE_NAME, read_metrics
from grpo_dist.tracking.rollouts import recorded_steps
from grpo_dist.trainer.checkpoint.config_changes import MISSING, read_config
from grpo_dist.trainer.health import HealthMonitor

Row = Mapping[str, float]


@dataclass(frozen=True)
class Alarm:
    """A health rule that was broken: at which step, which one, and what the run said about it."""

    step: int
    rule: str
    text: str


@dataclass(frozen=True)
class RunFolder:
    """A run, as its folder has it.

    Attributes:
        path: of the folder.
        name: for titles: project and experiment, or the folder's name.
        rows: one for each step, "step" and metrics.
        config: resolved, secrets replaced.
        alarms: broken health rules, in the order of the steps.
        rollout_steps: steps whose responses are there.
    """

    path: Path
    name: str
    rows: Sequence[Row]
    config: Mapping[str, Any]
    alarms: Sequence[Alarm] = ()
    rollout_steps: Sequence[int] = field(default_factory=tuple)

    @property
    def validation(self) -> list[str]:
        """Names of the validation metrics that say most, one for each data source."""
        return list(dict.fromkeys(name for row in self.rows for name in metric_names.validation_metrics(row)))


def read_run(folder: Path) -> RunFolder:
    """Read a run's folder; the run may still be going on.

    Raises:
        ConfigError: it is no run's folder, or its record cannot be read.
    """
    if not (folder / FILE_NAME).is_file():
        raise ConfigError(
            f"{folder}: no run has written here ({FILE_NAME} is missing); give the folder that the run calls "
            "`run directory` (trainer.default_local_dir)"
        )
    rows = read_metrics(folder / FILE_NAME)
    try:
        config = redact(read_config(folder))
    except CheckpointError as error:
        raise ConfigError(f"{error}; `grpo-dist report` needs the config beside {FILE_NAME}") from None
    trainer = config.get("trainer", {})
    names = [str(trainer[key]) for key in ("project_name", "experiment_name") if trainer.get(key)]
    alarms = find_alarms(rows, trainer.get("health"))
    return RunFolder(folder, "/".join(names) or folder.name, rows, config, alarms, recorded_steps(folder))


def find_alarms(rows: Sequence[Row], settings: Mapping[str, Any] | None) -> list[Alarm]:
    """Judge the steps by the run's health rules again, as the run itself did.

    Args:
        rows: one for each step.
        settings: `trainer.health` of the run; None: its command has no such rules.
    """
    if settings is None:
        return []
    monitor, alarms = HealthMonitor(HealthConfig.model_validate(settings)), []
    for row in rows:
        step = int(row["step"])
        metrics = {name: value for name, value in row.items() if name != "step"}
        judged = monitor.judge(metrics, step)
        for text in (*judged.faults, *judged.warnings):
            alarms.append(Alarm(step, text.partition("health/")[2].partition(" ")[0], text))
    return alarms


def compare_configs(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Keys whose values differ between the runs: (key, the value in each run)."""
    flat = [dict(flatten(run.config)) for run in runs]
    found = []
    for key in dict.fromkeys(key for config in flat for key in config):
        values = [str(config.get(key, MISSING)) for config in flat]
        if len(set(values)) > 1:
            found.append((key, values))
    return found
