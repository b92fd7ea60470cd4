"""What a run has left in its folder, read for tools: metrics, config, alarms, recorded steps and checkpoints.

A folder is read whatever its run was started with; code that it names is run only by those who trust it
(config/run_code.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpo_dist.assets import POLICY_KEY, TRAINED_MODEL_KEY
from grpo_dist.assets.model_folder import FILE
from grpo_dist.config.command import AnyCommand
from grpo_dist.config.keys import as_text, flatten, with_value
from grpo_dist.config.load import saved_values, with_overrides
from grpo_dist.config.run_code import (
    MODEL,
    REWARD,
    SUPERVISED_MODEL,
    UPDATE,
    code_of_run,
    hidden,
    hidden_keys,
    require_trust,
)
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_health import HealthConfig, HealthMonitor
from grpo_dist.config.schema_job import SupervisedConfig
from grpo_dist.errors import ConfigError, DataError, GrpoDistError
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT
from grpo_dist.plan.plan import Plan, make_plan
from grpo_dist.plan.rules import engine_of
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.parquet import read_parquet
from grpo_dist.redact import redact
from grpo_dist.tracking import metric_names
from grpo_dist.tracking.jsonl import METRICS, ROLLOUTS, read_metrics, readable_metrics
from grpo_dist.tracking.rollouts import recorded_steps
from grpo_dist.tracking.summary import who_waited
from grpo_dist.trainer.checkpoint.config_changes import MISSING, digest_code, read_config
from grpo_dist.trainer.checkpoint.folder import (
    CONFIG,
    LATEST,
    STATE,
    checkpoints,
    last_checkpoint,
    others,
    own_checkpoints,
    read_state,
    step_of,
)
from grpo_dist.trainer.record import EXPORTED

Row = Mapping[str, float]
RESCORED = (*REWARD, "data.", "algorithm.", "actor_rollout_ref.model.")  # what scores and updates are computed from


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
        against: what separates it from a run that it is compared with, by column (report/rollouts.py).
    """

    path: Path
    name: str
    rows: Sequence[Row]
    config: Mapping[str, Any]
    alarms: Sequence[Alarm] = ()
    rollout_steps: Sequence[int] = field(default_factory=tuple)
    problems: Sequence[str] = ()
    waited: str = ""
    against: Mapping[str, str] = field(default_factory=dict)

    @property
    def validation(self) -> list[str]:
        """Names of the validation metrics that say most, one for each data source."""
        return list(dict.fromkeys(name for row in self.rows for name in metric_names.validation_metrics(row)))


def read_run(folder: Path) -> RunFolder:
    """Read a run's folder; the run may still be going on. Damaged parts of the record are told and left out."""
    _check_run(folder)
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
            waited = who_waited(rows, make_plan(saved_values(read_config(folder), GRPO)))
    title = "/".join(names) or folder.name
    return RunFolder(folder, title, rows, config, alarms, recorded_steps(folder), problems, waited)


def _check_run(folder: Path) -> None:
    if not (folder / METRICS).is_file():
        raise ConfigError(
            f"{folder}: no run has written here ({METRICS} is missing); give the folder that the run calls "
            "`run directory` (trainer.default_local_dir)"
        )


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


# --- a recorded step ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Recorded:
    """A step as a run has recorded it: its batch, its row of metrics.jsonl, and the config with what was not saved."""

    run_dir: Path
    step: int
    config: RunConfig
    data: DataProto
    metrics: Mapping[str, float]

    @functools.cached_property
    def plan(self) -> Plan[RunConfig]:
        """The plan of the run; its training steps are known only if the config says how many there are."""
        return make_plan(self.config, self.config.trainer.total_training_steps or 0)

    @property
    def sampled(self) -> DataProto:
        """The batch with the mask of all sampled tokens, some of which the run may have left out (`rollout_rs`)."""
        if "weight_versions" not in self.data.columns():
            return self.data
        versions = self.data["weight_versions"]
        mask = Ragged((versions.values >= 0).to(torch.int8), versions.offsets)
        return DataProto({**self.data.batch, "response_mask": mask}, self.data.non_tensor_batch)

    @property
    def only_critic_learned(self) -> bool:
        """Tell whether the policy stood still in the step, since the critic was not warm yet."""
        return self.step <= self.plan.config.still_steps


def read_recorded(run_dir: Path, step: int, overrides: tuple[str, ...] = (), *, trust: bool = False) -> Recorded:
    """Read a step.

    Args:
        overrides: values that the run has not saved, and code of it that is the user's own.
        trust: whether the folder may name code to run.

    Raises:
        ConfigError: the folder has no such step, an override is wrong or changes what the run had, a value that was not
            saved is lacking, or the step needs code that the folder may not name.
        DataError: its file cannot be read.
    """
    _check_run(run_dir)
    path = run_dir / ROLLOUTS / f"{step}.parquet"
    if not path.is_file():
        steps = sorted(int(file.stem) for file in path.parent.glob("*.parquet"))
        others = f"there are steps {steps[0]} to {steps[-1]}" if steps else "none is there (trainer.log_rollouts)"
        raise ConfigError(f"step {step}: {path} is missing; of those with tokens {others}")
    values = dict(read_config(run_dir))
    if "actor_rollout_ref" not in values:
        raise ConfigError(f"{run_dir}: only runs of grpo-dist train can be replayed")
    ran, config = saved_values(values, GRPO), with_overrides(values, overrides, GRPO)
    given, unsaved = with_overrides({}, overrides, GRPO), hidden_keys(ran)
    _check_same(ran, config, unsaved)
    if lacking := hidden(run_dir / CONFIG, config, RESCORED, given):
        raise ConfigError(lacking)
    folder = last_checkpoint(run_dir)
    had = read_state(folder).code if unsaved and folder is not None else {}
    has = digest_code(config, had)
    if changed := [key for key in has if key in unsaved and has[key] != had.get(key, has[key])]:
        raise ConfigError(f"{', '.join(changed)} was another value in the run, by its digest in {folder}")
    if drafted := engine_of(config).unseeded(config):
        raise ConfigError(
            f"{run_dir}: its tokens were drafted, so no seed gives them again; replay a run without {drafted}"
        )
    if not trust:
        require_trust(run_dir / CONFIG, code_of_run(config, (*MODEL, *REWARD, *UPDATE), given))
    try:
        data = read_parquet(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the step cannot be read: {error}") from None
    metrics = next((row for row in read_metrics(run_dir / METRICS) if row["step"] == step), {})
    return Recorded(run_dir, step, config, data, metrics)


def _check_same(ran: RunConfig, config: RunConfig, unsaved: Sequence[str]) -> None:
    """Refuse overrides that change more than what was not saved: a step is computed again by its own config."""
    before, after = (dict(flatten(one.model_dump(mode="json"))) for one in (ran, config))
    keys = (key for key in dict.fromkeys([*before, *after]) if key not in unsaved)
    pairs = ((key, before.get(key, MISSING), after.get(key, MISSING)) for key in keys)
    if changed := "\n".join(f"  {key}: {as_text(had)} -> {as_text(has)}" for key, had, has in pairs if had != has):
        raise ConfigError(
            f"these keys had another value in the run:\n{changed}\nLeave them out: a step is computed again by its own "
            "config. `grpo-dist check-env` and `grpo-dist eval` score responses with another function"
        )


# --- checkpoints ----------------------------------------------------------------------------------------------------
def named_checkpoint(folder: Path, step: int | None) -> Path | None:
    """Return the checkpoint that a folder is, else of the last run in it the last one, or the one of a step, if any."""
    if folder.name.startswith("global_step_") and (folder / STATE).is_file():
        if step not in (None, step_of(folder)):
            raise ConfigError(f"--step {step}: {folder} is a checkpoint of another step; name the run's folder")
        return folder
    own = own_checkpoints(folder)
    if step is None:
        return last_checkpoint(folder)
    if own and step not in own:
        steps = ", ".join(map(str, own))
        raise ConfigError(
            f"--step {step}: the run in {folder} has checkpoints at steps {steps}; choose one of them{others(folder)}"
        )
    return own.get(step)


def no_checkpoint(run_dir: Path, step: int | None) -> str:
    """Return that a folder has no checkpoint of its last run, and what else there is."""
    asked = "" if step is None else f"--step {step}: "
    if left := checkpoints(run_dir):
        return (
            f"{asked}{run_dir / LATEST} names none of the checkpoints that are there. The run that was started in this "
            "folder last has written none yet, or that file was not copied along; name the one that you mean, such as "
            f"{left[-1]}"
        )
    text = (
        f"{asked}{run_dir}: there is no checkpoint (global_step_N) in this folder; name the run's folder, "
        "trainer.default_local_dir of the run, which writes checkpoints every trainer.save_freq steps"
    )
    if (model := run_dir / EXPORTED).is_dir():
        text += (
            f". {model / FILE} does not say that the model is of the run of {run_dir / CONFIG}: a run before "
            f"that wrote it, or an older version of grpo_dist; to use it all the same, name {model}"
        )
    return text


def saved_run(checkpoint: Path, model: str | None = None, *, trust: bool) -> RunConfig | SupervisedConfig:
    """The config of the run that wrote a checkpoint.

    Args:
        model: where the model is that the run started from; None: where the run found it.
        trust: whether it may name code of the model to run.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: it has keys or values that this version does not know, or names code without trust.
    """
    values = read_config(checkpoint)
    command: AnyCommand = SFT if "messages_key" in values.get("data", {}) else REWARD_MODEL
    key, keys = TRAINED_MODEL_KEY, SUPERVISED_MODEL
    if "actor_rollout_ref" in values:
        command, key, keys = GRPO, POLICY_KEY, MODEL
    config = saved_values(values, command)
    config = config if model is None else with_value(config, key, model)
    if not trust:
        require_trust(checkpoint / CONFIG, code_of_run(config, keys))
    return config
