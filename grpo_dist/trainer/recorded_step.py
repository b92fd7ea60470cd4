"""A training step as a run has recorded it (tracking/rollouts.py), and the first number of it that is another one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_dist.config.keys import as_text, flatten
from grpo_dist.config.load import saved_values, with_overrides
from grpo_dist.config.run_code import MODEL, REWARD, UPDATE, code_of_run, hidden, hidden_keys, require_trust
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plan.commands import GRPO
from grpo_dist.plan.plan import Plan, make_plan
from grpo_dist.plan.rules import drafts
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.parquet import read_parquet
from grpo_dist.tracking.jsonl import METRICS, ROLLOUTS, read_metrics
from grpo_dist.trainer.checkpoint.config_changes import MISSING, digest_code, read_config
from grpo_dist.trainer.checkpoint.folder import CONFIG, last_checkpoint, read_state

RESCORED = (*REWARD, "data.", "algorithm.", "actor_rollout_ref.model.")  # what scores and updates are computed from
SCORE_TOLERANCE = 1e-6  # scores are computed by the same code on any machine


@dataclass(frozen=True)
class Recorded:
    """A step as a run has recorded it.

    Attributes:
        config: of the run, with the values that it has not saved.
        data: the step's batch.
        metrics: the step's row of metrics.jsonl.
    """

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
        """The batch before its targets: with the mask of the tokens that were sampled, of which the run may have left
        out some since (truncated responses, `rollout_rs`).
        """
        if "weight_versions" not in self.data.columns():
            return self.data
        versions = self.data["weight_versions"]
        mask = Ragged((versions.values >= 0).to(torch.int8), versions.offsets)
        return DataProto({**self.data.batch, "response_mask": mask}, self.data.non_tensor_batch)

    @property
    def only_critic_learned(self) -> bool:
        """Tell whether the policy stood still in the step, since the critic was not warm yet."""
        return bool(self.plan.config.critic.enable) and self.step <= self.config.trainer.critic_warmup


@dataclass(frozen=True)
class Difference:
    """The first number of a column, or the metric, that is not what the run had.

    Attributes:
        name: of the column or the metric.
        recorded: by the run.
        computed: now.
        row: of the batch; None for a metric.
        token: of the response; None where the row has one number.
    """

    name: str
    recorded: float
    computed: float
    row: int | None = None
    token: int | None = None


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
    if not (run_dir / METRICS).is_file():
        raise ConfigError(f"{run_dir}: no run has written here ({METRICS} is missing)")
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
    if drafted := drafts(config):
        raise ConfigError(
            f"{run_dir}: its tokens were drafted, so no seed gives them again; replay a run without {drafted}"
        )
    if not trust:
        require_trust(run_dir / CONFIG, code_of_run(config, (*MODEL, *REWARD, *UPDATE), given))
    data = read_step(path)
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
            "config. `grpo-dist check-reward` and `grpo-dist eval` score responses with another function"
        )


def read_step(path: Path) -> DataProto:
    """Read the tokens of a step that a run has recorded.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        return read_parquet(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the step cannot be read: {error}") from None


def first_difference(recorded: DataProto, computed: DataProto, tolerance: float) -> Difference | None:
    """The first number that differs, by the order of the computed columns, then of rows and tokens.

    Args:
        recorded: the run's batch.
        computed: some of its columns.
        tolerance: up to which numbers count as equal, relative to numbers above 1; nan equals nan.
    """
    for name, column in computed.batch.items():
        if name not in recorded.columns():
            continue
        computed_values, before = _values(column), _values(recorded[name])
        if len(computed_values) != len(before):
            return Difference(name, len(before), len(computed_values))
        apart = (computed_values - before).abs() > tolerance * before.abs().clamp_min(1)
        apart |= computed_values.isnan() != before.isnan()
        if apart.any():
            place = int(apart.nonzero()[0])
            row, token = place, None
            if isinstance(column, Ragged):
                row = int(torch.searchsorted(column.offsets, place, right=True)) - 1
                token = place - int(column.offsets[row])
            return Difference(name, float(before[place]), float(computed_values[place]), row, token)
    return None


def _values(column: Any) -> torch.Tensor:
    return (column.values if isinstance(column, Ragged) else column).double()
