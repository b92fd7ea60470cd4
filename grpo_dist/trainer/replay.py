"""Computes a recorded training step again: rewards, advantages and, from the checkpoint before it, the update.

What a run has recorded of a step (tracking/rollouts.py) is all that it was made of, but for the weights. So it can
be computed again anywhere, without Ray, without rollout engines and on CPU, and compared number by number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_dist.assets import resolve_model_path
from grpo_dist.config.grpo import GRPO
from grpo_dist.config.load import with_overrides
from grpo_dist.config.placement import placement
from grpo_dist.config.run_code import MODEL, REWARD, UPDATE, code_of_run, require_trust
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.prompts import Prompt, add_system_prompt
from grpo_dist.engines.base import SEQUENCE_COLUMNS, TrainEngine
from grpo_dist.engines.rendezvous import LOOPBACK, init_process_group, open_store
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.protocol import DataProto, Ragged, metric_values
from grpo_dist.protocol.fields import EXTRA
from grpo_dist.protocol.parquet import read_parquet
from grpo_dist.tracking.jsonl import FILE_NAME, read_metrics
from grpo_dist.tracking.record import ROLLOUTS
from grpo_dist.trainer.checkpoint.config_changes import read_config
from grpo_dist.trainer.checkpoint.folder import CONFIG, own_checkpoints
from grpo_dist.trainer.checkpoint.identity import others
from grpo_dist.trainer.mini_batches import mini_batches
from grpo_dist.trainer.rollout.seeds import group_seed
from grpo_dist.trainer.run_prompts import read_prompts
from grpo_dist.trainer.settings import objective_settings, policy_settings, reward_settings, target_settings
from grpo_dist.workers.gang import averaged
from grpo_dist.workers.reward import RewardWorker, Task

TIMEOUT_S = 600.0  # no other rank is waited for
_UID = re.compile(r"step\d+-prompt(\d+)(-try\d+)?")
# Of the update's metrics those that follow from batch and weights.
UPDATE_METRICS = (
    "actor/loss",
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "actor/pg_clipfrac",
)


@dataclass(frozen=True)
class Recorded:
    """A step as a run has recorded it.

    Attributes:
        run_dir: the run's folder.
        step: its number.
        config: of the run, with the overrides.
        data: the step's batch.
        metrics: the step's row of metrics.jsonl.
    """

    run_dir: Path
    step: int
    config: RunConfig
    data: DataProto
    metrics: Mapping[str, float]


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
        run_dir: the run's folder.
        step: its number.
        overrides: of the config.
        trust: whether the folder may name code to run.

    Raises:
        ConfigError: the folder has no such step, or an override is wrong, or the step needs code that it may not name.
        DataError: its file cannot be read.
    """
    if not (run_dir / FILE_NAME).is_file():
        raise ConfigError(f"{run_dir}: no run has written here ({FILE_NAME} is missing)")
    path = run_dir / ROLLOUTS / f"{step}.parquet"
    if not path.is_file():
        there = sorted(int(each.stem) for each in path.parent.glob("*.parquet"))
        found = f"there are steps {there[0]} to {there[-1]}" if there else "none is there (trainer.log_rollouts)"
        raise ConfigError(f"step {step}: {path} is missing; of those with tokens {found}")
    values = dict(read_config(run_dir))
    if "actor_rollout_ref" not in values:
        raise ConfigError(f"{run_dir}: only runs of grpo-dist train can be replayed")
    config = with_overrides(values, overrides, GRPO)
    if not trust:
        given = with_overrides({}, overrides, GRPO)
        require_trust(run_dir / CONFIG, code_of_run(config, (*MODEL, *REWARD, *UPDATE), given))
    try:
        data = read_parquet(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the step cannot be read: {error}") from None
    metrics = next((row for row in read_metrics(run_dir / FILE_NAME) if row["step"] == step), {})
    return Recorded(run_dir, step, config, data, metrics)


@contextmanager
def reward_worker(config: RunConfig) -> Iterator[RewardWorker]:
    """A reward process's work in this process; the function itself runs in a child, as in a run."""
    worker = RewardWorker()
    worker.start(reward_settings(config))
    try:
        yield worker
    finally:
        worker.scorer.stop()


def rescore(recorded: Recorded, worker: RewardWorker) -> tuple[DataProto, list[str]]:
    """Score the responses again.

    Returns:
        (`score`, `token_level_scores` and, with steps, `step_mask`; why responses could not be scored).

    Raises:
        ConfigError: a reward model judges steps: what it said of them is not recorded.
        DataError: a prompt is not in the training rows any more.
    """
    config, data = recorded.config, recorded.data
    if config.reward_model.enable and config.reward_model.process.enable:
        raise ConfigError("reward_model.process.enable=true: the scores of steps cannot be computed again")
    prompts = _prompts(recorded, worker)
    given = data["episode_reward"].numpy() if "episode_reward" in data.columns() else None
    parts, failures = [], []
    uids = data["uid"]
    starts = [0, *(i for i in range(1, len(uids)) if uids[i] != uids[i - 1])]
    for start, end in zip(starts, [*starts[1:], len(uids)], strict=True):
        group = data.slice(start, end)
        rewards = np.full(end - start, np.nan, np.float32) if given is None else given[start:end]
        task = _task(prompts[uids[start]], group)
        _, failed, scored = worker.score_group(group, task, rewards)
        parts.append(scored)
        failures += failed
    return DataProto.concat(parts), failures


def retarget(recorded: Recorded, worker: RewardWorker, scores: DataProto) -> DataProto:
    """Compute the advantages again, from these scores.

    Args:
        recorded: the step.
        worker: a reward process's work.
        scores: columns that take the place of the recorded ones.
    """
    config = recorded.config
    data = DataProto({**recorded.data.batch, **scores.batch}, recorded.data.non_tensor_batch)
    coef = recorded.metrics.get("actor/reward_kl_penalty_coeff", config.algorithm.kl_ctrl.kl_coef)
    seed = group_seed(config.trainer.seed, recorded.step, -1)
    small = {name: column.numpy() for name, column in data.batch.items() if isinstance(column, torch.Tensor)}
    *_, found = worker.targets_of(data, small, target_settings(config), coef, seed)
    return found


def weights_before(recorded: Recorded) -> Path | None:
    """The checkpoint before the step; None: the step is the first one, and its weights are the model's own.

    Raises:
        ConfigError: there is none.
    """
    if recorded.step == 1:
        return None
    there = own_checkpoints(recorded.run_dir)
    if recorded.step - 1 not in there:
        steps = ", ".join(str(step + 1) for step in (0, *there))
        raise ConfigError(
            f"step {recorded.step}: its update starts from the weights after step {recorded.step - 1}, of which there "
            f"is no checkpoint; steps whose update can be replayed: {steps} (trainer.save_freq)"
            f"{others(recorded.run_dir)}"
        )
    return there[recorded.step - 1]


def reupdate(recorded: Recorded) -> tuple[DataProto, dict[str, float]]:
    """Take the policy's optimizer steps again, on CPU and on one rank.

    Returns:
        (`old_log_probs` by the weights before the step, metrics of the update).

    Raises:
        ConfigError: there is no checkpoint before the step, or the loss needs what is not recorded.
    """
    config = recorded.config
    objective = objective_settings(config)
    if missing := [name for name in objective.columns if name not in recorded.data.columns()]:
        raise ConfigError(f"{recorded.run_dir}: the update needs {', '.join(missing)}, which no run records")
    checkpoint = weights_before(recorded)
    with _engine(config) as engine:
        if checkpoint is not None:
            engine.load_checkpoint(checkpoint / "actor")
        size = {"micro_batch_size": config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu}
        data = recorded.data.select([*SEQUENCE_COLUMNS, *objective.columns, "uid"])
        old = engine.compute_columns(data, ("log_probs",), **size)["log_probs"]
        groups = mini_batches(config, config.actor_rollout_ref.actor, len(data), recorded.step - 1)
        results = [engine.train_mini_batch(data.index(rows), objective=objective, **size).metrics for rows in groups]
    return DataProto.from_dict({"old_log_probs": old}), metric_values(averaged(results))


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
        found, before = _values(column), _values(recorded[name])
        if len(found) != len(before):
            return Difference(name, len(before), len(found))
        apart = (found - before).abs() > tolerance * before.abs().clamp_min(1)
        apart |= found.isnan() != before.isnan()
        if apart.any():
            place = int(apart.nonzero()[0])
            row, token = place, None
            if isinstance(column, Ragged):
                row = int(torch.searchsorted(column.offsets, place, right=True)) - 1
                token = place - int(column.offsets[row])
            return Difference(name, float(before[place]), float(found[place]), row, token)
    return None


def metric_difference(
    recorded: Mapping[str, float], computed: Mapping[str, float], tolerance: float
) -> Difference | None:
    """The first of `UPDATE_METRICS` that differs; as in `first_difference`."""
    for name in UPDATE_METRICS:
        if name in recorded and name in computed:
            before, found = recorded[name], computed[name]
            if abs(found - before) > tolerance * max(abs(before), 1):
                return Difference(name, before, found)
    return None


def _prompts(recorded: Recorded, worker: RewardWorker) -> dict[str, Prompt]:
    """The training row of each group."""
    config = recorded.config
    files = config.data.train_files
    rows = read_prompts(config, "data.train_files", files, config.data.train_max_samples, worker.scorer.needs)
    if config.data.system_prompt is not None:
        rows, _ = add_system_prompt(rows, config.data.system_prompt)
    by_index = {prompt.index: prompt for prompt in rows}
    found = {}
    for uid in dict.fromkeys(recorded.data["uid"]):
        named = _UID.fullmatch(uid)
        if named is None or int(named[1]) not in by_index:
            raise DataError(
                f"data.train_files: {uid} of step {recorded.step} is not among its {len(rows)} rows any more"
            )
        found[uid] = by_index[int(named[1])]
    return found


def _task(prompt: Prompt, group: DataProto) -> Task:
    said = {
        name.removeprefix(EXTRA): column.numpy()
        for name, column in group.batch.items()
        if name.startswith(f"{EXTRA}rm_") and isinstance(column, torch.Tensor)
    }
    return Task(
        prompt.data_source,
        prompt.ground_truth,
        prompt.extra_info,
        prompt.messages,
        model_scores=said,
        columns=prompt.columns,
        is_text=prompt.is_text,
    )


@contextmanager
def _engine(config: RunConfig) -> Iterator[TrainEngine]:
    """The policy as it trains, on CPU and on one rank."""
    settings = policy_settings(config, placement(config), 1)
    model = replace(
        settings.model,
        path=resolve_model_path(settings.model.path, key=settings.model.key),
        fsdp_size=-1,
        param_offload=False,
        optimizer_offload=False,
    )
    init_process_group(device="cpu", rank=0, world_size=1, store=open_store(LOOPBACK), timeout_s=TIMEOUT_S)
    try:
        yield FSDPEngine(
            model,
            device="cpu",
            temperature=settings.temperature,
            optimizer=settings.optimizer,
            grad_clip=settings.grad_clip,
        )
    finally:
        dist.destroy_process_group()


def _values(column: Any) -> torch.Tensor:
    return (column.values if isinstance(column, Ragged) else column).double()
