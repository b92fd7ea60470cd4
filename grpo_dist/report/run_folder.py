"""Reads what a run has written into its folder: metrics, config, broken health rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_dist.config.keys import flatten
from grpo_dist.config.load import saved_values
from grpo_dist.config.schema_health import HealthConfig, HealthMonitor
from grpo_dist.errors import ConfigError, GrpoDistError
from grpo_dist.plan.commands import GRPO
from grpo_dist.redact import redact
from grpo_dist.tracking import metric_names
from grpo_dist.tracking.jsonl import METRICS, readable_metrics
from grpo_dist.tracking.rollouts import recorded_steps
from grpo_dist.tracking.summary import who_waited
from grpo_dist.trainer.checkpoint.config_changes import MISSING, read_config

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
        name: for titles: project and experiment, or the folder's name.
        rows: one for each step, "step" and metrics.
        config: resolved, secrets replaced.
        alarms: broken health rules, in the order of the steps.
        rollout_steps: steps whose responses are there.
        problems: what of the record is damaged and left out.
        waited: which role waited, in one sentence; "" where nothing can be said.
    """

    path: Path
    name: str
    rows: Sequence[Row]
    config: Mapping[str, Any]
    alarms: Sequence[Alarm] = ()
    rollout_steps: Sequence[int] = field(default_factory=tuple)
    problems: Sequence[str] = ()
    waited: str = ""

    @property
    def validation(self) -> list[str]:
        """Names of the validation metrics that say most, one for each data source."""
        return list(dict.fromkeys(name for row in self.rows for name in metric_names.validation_metrics(row)))


def read_run(folder: Path) -> RunFolder:
    """Read a run's folder; the run may still be going on. Damaged parts of the record are told and left out."""
    if not (folder / METRICS).is_file():
        raise ConfigError(
            f"{folder}: no run has written here ({METRICS} is missing); give the folder that the run calls "
            "`run directory` (trainer.default_local_dir)"
        )
    try:
        rows, problems = readable_metrics(folder / METRICS)
    except OSError as error:
        raise ConfigError(f"{folder / METRICS} cannot be read: {error}") from None
    config: Mapping[str, Any] = {}
    waited = ""
    with noting(problems, "the config is left out"):
        config = redact(read_config(folder))
    trainer = section(config, "trainer")
    names = [str(trainer[key]) for key in ("project_name", "experiment_name") if trainer.get(key)]
    alarms: Sequence[Alarm] = ()
    with noting(problems, "trainer.health of the config cannot be used, so alarms are left out"):
        alarms = find_alarms(rows, trainer.get("health"))
    if "actor_rollout_ref" in config and any(name.startswith(metric_names.IDLE) for row in rows for name in row):
        with noting(problems, "which role waited is left out"):
            waited = who_waited(rows, saved_values(read_config(folder), GRPO))
    title = "/".join(names) or folder.name
    return RunFolder(folder, title, rows, config, alarms, recorded_steps(folder), problems, waited)


@contextmanager
def noting(problems: list[str], left_out: str) -> Iterator[None]:
    """Go on after an error in a part of a record, with a line of what is left out and why.

    A damaged record can fail in any way, also in the libraries that read it.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - it is told
        kind = "" if isinstance(error, GrpoDistError) else f"{type(error).__name__}: "
        problems.append(f"{left_out}: {kind}{error}")


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a config; {} where there is none, or something else in its place."""
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def find_alarms(rows: Sequence[Row], settings: Mapping[str, Any] | None) -> list[Alarm]:
    """Judge the steps by `trainer.health` again, as the run itself did; None: its command has no such rules."""
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


def config_table(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Return (key, its value in each run): all keys of a single run, of several those whose values differ."""
    flat = [dict(flatten(run.config)) for run in runs]
    settings = []
    for key in dict.fromkeys(key for config in flat for key in config):
        values = [str(config.get(key, MISSING)) for config in flat]
        if len(runs) == 1 or len(set(values)) > 1:
            settings.append((key, values))
    return settings
