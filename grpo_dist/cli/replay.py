"""`grpo-dist replay RUN_DIR STEP` computes a recorded step again, and names the first number that differs.

What a run has recorded of a step (`runs.Recorded`) is all that it was made of, but for the weights. So rewards,
advantages and, from the checkpoint before it, the update can be computed again anywhere, by what computes them in a
run: without Ray, without rollout engines and on CPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_dist.algorithms.controllers import AgentBaselines
from grpo_dist.algorithms.settings import ENTROPY_WEIGHT, ObjectiveSettings
from grpo_dist.assets import expanded, resolve_model_path
from grpo_dist.assets.model_folder import check_model_folder
from grpo_dist.cli.arguments import add_shared, command_parser
from grpo_dist.config.run_code import FLAG
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.prompts import Prompt
from grpo_dist.engines.rendezvous import alone
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plan.plan import Plan
from grpo_dist.plan.roles import models_of
from grpo_dist.protocol import DataProto, Ragged, metric_values
from grpo_dist.protocol.fields import EXTRA, columns_for
from grpo_dist.protocol.media import MEDIA
from grpo_dist.protocol.sequences import ROUTES
from grpo_dist.rewards.contract import RowNeeds
from grpo_dist.runs import Recorded, read_recorded
from grpo_dist.sandbox.base import given
from grpo_dist.terminal import show
from grpo_dist.tracking.jsonl import METRICS
from grpo_dist.trainer.checkpoint.folder import others, own_checkpoints
from grpo_dist.trainer.loop import mini_batches
from grpo_dist.trainer.rollout.job import group_seed
from grpo_dist.trainer.run_prompts import image_processor, load_run_prompts, template_kwargs, total_steps, training_rows
from grpo_dist.workers.gang import averaged
from grpo_dist.workers.reward import RewardWorker
from grpo_dist.workers.scorer import RewardSettings, Task

SCORE_TOLERANCE = 1e-6  # scores are computed by the same code on any machine
LR_TOLERANCE = 1e-6  # relative
# Numbers that are computed on another machine, or by the engine on GPU, differ by rounding.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}
_UID = re.compile(r"step\d+-prompt(\d+)(-try\d+)?")
# Of the update's metrics those that follow from batch and weights.
_FOLLOW = ("loss", "pg_loss", "kl_loss", "entropy", "grad_norm", "pg_clipfrac")
UPDATE_METRICS = tuple(f"actor/{name}" for name in _FOLLOW)


def main(arguments: Sequence[str]) -> int:
    """Replay a step; 1 if a number differs."""
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
    options = parser.parse_intermixed_args(arguments)
    recorded = read_recorded(expanded(options.run_dir), options.step, tuple(options.overrides), trust=options.trust)
    with reward_worker(recorded.plan) as worker:
        scores = rescore(recorded, worker)
        same = _tell("rewards", recorded, scores, SCORE_TOLERANCE)
        same = same and _tell("advantages", recorded, retarget(recorded, worker, scores), 1e-4)
    if same and not options.no_update:
        same = _update(recorded, options.update)
    return 0 if same else 1


def _tell(what: str, recorded: Recorded, computed: DataProto, tolerance: float) -> bool:
    columns = ", ".join(name for name in computed.columns() if name in recorded.data.columns())
    difference = first_difference(recorded.data.batch, computed.batch, tolerance)
    return _verdict(what, recorded, difference, f"as recorded ({columns})")


def _verdict(what: str, recorded: Recorded, difference: Difference | None, same: str) -> bool:
    """Say what differs, or what is the `same`; returns whether nothing differs."""
    if difference is None:
        show(f"{what}: {same}\n")
        return True
    where = ""
    if difference.row is not None:
        where = f", response {difference.row} ({recorded.data['uid'][difference.row]})"
        where += "" if difference.token is None else f", token {difference.token}"
    show(
        f"{what}: the first difference is in {difference.name}{where}\n"
        f"  recorded {difference.recorded:.9g}\n  computed {difference.computed:.9g}\n"
    )
    return False


def _update(recorded: Recorded, asked: bool) -> bool:
    dtype = recorded.plan.ranks("actor").model.compute_dtype
    try:
        old, metrics = reupdate(recorded)
    except ConfigError as error:
        if asked:
            raise
        show(f"update: not computed: {error}\n")
        return True
    what = "log-probs before the update"
    if not old.columns():
        show(f"{what}: not compared: algorithm.rollout_correction.bypass_mode=true takes the sampler's\n")
    elif not _tell(what, recorded, old, TOLERANCE[dtype]):
        return False
    if recorded.only_critic_learned:
        still = recorded.plan.config.still_steps
        show(f"update: none of the policy, which stands still for {still} steps; no other is computed again\n")
        return True
    had = {name: recorded.metrics[name] for name in UPDATE_METRICS if name in recorded.metrics}
    if not had:
        show(f"update: not compared: step {recorded.step} has no metrics in {recorded.run_dir}/{METRICS}\n")
        return True
    compared = {name: metrics[name] for name in had if name in metrics}
    figures = ", ".join(f"{name} {value:.4g}" for name, value in compared.items())
    same = f"as recorded, up to {TOLERANCE[dtype]:g} ({dtype}): {figures}"
    return _verdict("update", recorded, first_difference(had, compared, TOLERANCE[dtype]), same)


# --- rewards and advantages ------------------------------------------------------------------------------------------
@contextmanager
def reward_worker(plan: Plan[RunConfig]) -> Iterator[RewardWorker]:
    """A reward process's work in this process; the function itself runs in a child, as in a run."""
    worker = RewardWorker()
    teaches = plan.config.algorithm.self_distillation.enable
    settings = RewardSettings.of(plan, template_kwargs(plan.config) if teaches else {})
    with given(plan.config.sandbox.model_dump()):
        worker.start(replace(settings, teacher=None))  # what it told is not part of scores
        try:
            yield worker
        finally:
            worker.scorer.stop()


def rescore(recorded: Recorded, worker: RewardWorker) -> DataProto:
    """Score the responses again.

    Returns:
        `score`, `token_level_scores`, what the function says beside them and, with steps, `step_mask`.

    Raises:
        ConfigError: a reward model judges steps: what it said of them is not recorded.
        DataError: a prompt is not in the training rows any more.
    """
    config, data = recorded.config, recorded.sampled
    if config.reward_model.enable and config.reward_model.process.enable:
        raise ConfigError("reward_model.process.enable=true: the scores of steps cannot be computed again")
    prompts = _prompts(recorded, worker.scorer.needs)
    missing, uids = np.full(len(data), np.nan, np.float32), data["uid"]
    given = data["episode_reward"].numpy() if "episode_reward" in data.columns() else missing
    parts, labels = [], []
    starts = [0, *(i for i in range(1, len(uids)) if uids[i] != uids[i - 1])]
    for start, end in zip(starts, [*starts[1:], len(uids)], strict=True):
        group = data.slice(start, end)
        before = int(uids[start].removeprefix("step").partition("-")[0]) - 1
        model_scores = {
            name.removeprefix(EXTRA): column.numpy()
            for name, column in group.batch.items()
            if name.startswith(f"{EXTRA}rm_") and isinstance(column, torch.Tensor)
        }
        task = Task.of(prompts[uids[start]], model_scores=model_scores, step=before)
        label, _, scored = worker.score_group(group, task, given[start:end])
        parts.append(scored)
        labels.append(label)
    names = dict.fromkeys(name for label in labels for name in label.small if name.startswith(EXTRA))
    scored = DataProto.concat(parts)
    for name in names:
        values = [label.small.get(name, np.full(label.num_rows, np.nan, np.float32)) for label in labels]
        scored.batch[name] = torch.tensor(np.concatenate(values))
    return scored


def _prompts(recorded: Recorded, needs: RowNeeds) -> dict[str, Prompt]:
    config = recorded.config
    rows = training_rows(config, config.data.train_max_samples, needs)
    by_index = {prompt.index: prompt for prompt in rows}
    by_uid = {}
    for uid in dict.fromkeys(recorded.data["uid"]):
        named = _UID.fullmatch(uid)
        if named is None or int(named[1]) not in by_index:
            raise DataError(
                f"data.train_files: {uid} of step {recorded.step} is not among its {len(by_index)} rows any more"
            )
        by_uid[uid] = by_index[int(named[1])]
    return by_uid


def retarget(recorded: Recorded, worker: RewardWorker, scores: DataProto) -> DataProto:
    """Compute the advantages again, with these columns in the place of the recorded ones.

    Raises:
        ConfigError: they need a column or a figure that the run has not recorded.
    """
    config, settings = recorded.config, recorded.plan.targets
    if "agent_baselines" in settings.needs:
        baselines = AgentBaselines.recorded(recorded.metrics)
        if not baselines and recorded.step > 1:  # in the first step they are 0
            raise _not_recorded(recorded, "algorithm.adv_estimator=rae", "baselines of agents")
        settings = settings.with_agent_baselines(baselines)
    data = DataProto({**recorded.sampled.batch, **scores.batch}, recorded.data.non_tensor_batch)
    needed = [*settings.columns, *(["reward_baseline"] if "reward_baselines" in settings.needs else [])]
    _require(recorded, data, needed, f"the advantages of step {recorded.step} need")
    control, name = config.algorithm.kl_ctrl, "actor/reward_kl_penalty_coeff"
    if config.algorithm.use_kl_in_reward and control.type == "adaptive" and name not in recorded.metrics:
        raise _not_recorded(recorded, "algorithm.kl_ctrl.type=adaptive", name)
    kl_coef = recorded.metrics.get(name, control.kl_coef)
    seed = group_seed(config.trainer.seed, recorded.step, -1)
    small = {name: column.numpy() for name, column in data.batch.items() if isinstance(column, torch.Tensor)}
    *_, targets = worker.targets_of(data, small, settings, kl_coef, seed)
    return targets


def _require(recorded: Recorded, data: DataProto, needed: Sequence[str], who: str) -> None:
    if missing := [name for name in needed if name not in data.columns()]:
        raise ConfigError(f"{recorded.run_dir}: {who} {', '.join(missing)}, which is not recorded")


def _not_recorded(recorded: Recorded, key: str, figure: str) -> ConfigError:
    return ConfigError(
        f"step {recorded.step}: {key} needs the step's {figure}, which {recorded.run_dir}/{METRICS} does not have; "
        "replay a step that has it there"
    )


# --- the update ------------------------------------------------------------------------------------------------------
def weights_before(recorded: Recorded) -> Path | None:
    """The checkpoint before the step; None: the step is the first one, and its weights are the model's own."""
    if recorded.step == 1:
        return None
    by_step = own_checkpoints(recorded.run_dir)
    if recorded.step - 1 not in by_step:
        steps = ", ".join(str(step + 1) for step in (0, *by_step))
        raise ConfigError(
            f"step {recorded.step}: its update starts from the weights after step {recorded.step - 1}, of which there "
            f"is no checkpoint; steps whose update can be replayed: {steps} (trainer.save_freq)"
            f"{others(recorded.run_dir)}"
        )
    return by_step[recorded.step - 1]


def reupdate(recorded: Recorded) -> tuple[DataProto, dict[str, float]]:
    """Take the policy's optimizer steps again, on CPU and on one rank.

    Returns:
        (`old_log_probs` by the weights before the step, metrics of the update). No log-probs in bypass mode, where the
        recorded ones are the sampler's; no metrics where only the critic learned.

    Raises:
        ConfigError: there is no checkpoint before the step, the loss needs what is not recorded, or the step had other
            learning rates than the run's config gives it now.
    """
    config = recorded.config
    objective, data = _update_inputs(recorded)
    checkpoint = weights_before(recorded)
    with policy_engine(replace(recorded.plan, steps=_num_steps(config))) as engine:
        if checkpoint is not None:
            engine.load_checkpoint(checkpoint / "actor")
        limits = PassLimits("", config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu)
        groups = mini_batches(config, config.actor_rollout_ref.actor, data["uid"], recorded.step - 1)
        results = []
        log_probs = DataProto()
        if config.old_log_probs_from != "rollout":
            columns = engine.compute_columns(data, ("log_probs",), limits)
            log_probs = DataProto.from_dict({"old_log_probs": columns["log_probs"]})
        for rows in groups if not recorded.only_critic_learned else ():
            results.append(engine.train_mini_batch(data.index(rows), objective, limits).metrics)
    if not results:
        return log_probs, {}
    metrics = metric_values(averaged(results))
    had, has = (metrics_of_run.get("actor/lr", math.nan) for metrics_of_run in (recorded.metrics, metrics))
    if abs(had - has) > LR_TOLERANCE * abs(had):
        raise ConfigError(
            f"step {recorded.step}: its actor/lr was {had:.6g}, and by {recorded.run_dir}/config.yaml it is {has:.6g}: "
            "trainer.total_training_steps, trainer.total_epochs, the rows or actor_rollout_ref.actor.optim were "
            "changed after it, so its update cannot be computed again"
        )
    return log_probs, metrics


def _update_inputs(recorded: Recorded) -> tuple[ObjectiveSettings, DataProto]:
    config, data, objective = recorded.config, recorded.data, recorded.plan.objective
    if config.actor_rollout_ref.actor.entropy_target is not None:
        if ENTROPY_WEIGHT not in recorded.metrics:
            raise _not_recorded(recorded, "actor_rollout_ref.actor.entropy_target", ENTROPY_WEIGHT)
        objective = objective.with_entropy_coeff(recorded.metrics[ENTROPY_WEIGHT])
    _require(recorded, data, (*objective.columns, *((ROUTES,) if config.replays_routes else ())), "the update needs")
    return objective, _with_pictures(
        recorded, data.select((*columns_for(data.columns(), "forward"), *objective.columns))
    )


def _with_pictures(recorded: Recorded, data: DataProto) -> DataProto:
    """Make the pictures of the prompts again, by the model's processor."""
    model = recorded.config.actor_rollout_ref.model
    processor = image_processor(recorded.config, resolve_model_path(model.path, weights=False))
    if processor is None:
        return data
    prompts, made = _prompts(recorded, RowNeeds(ground_truth=False, taken=None, asked=False)), dict[str, Any]()
    for uid, ids in zip(data["uid"], data["prompts"].rows(), strict=True):
        if uid not in made:
            made[uid] = processor.media(prompts[uid].images, ids.numpy(), f"data.train_files: {uid}")
    return data.union(DataProto.from_dict({}, {MEDIA: [made[uid] for uid in data["uid"]]}))


def _num_steps(config: RunConfig) -> int:
    """The training steps of the run, by which its learning rates are laid out; the rows are read where these count."""
    steps, optim = config.trainer.total_training_steps, config.actor_rollout_ref.actor.optim
    by_ratio = optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0
    if steps or not (by_ratio or optim.lr_scheduler_type != "constant"):
        return steps or 1  # of a rate that is the same for any number
    training = config.model_copy(update={"data": config.data.model_copy(update={"val_files": []})})
    needs = RowNeeds(ground_truth=False, taken=None, asked=False)
    policy, trusted = models_of(config)[0], config.actor_rollout_ref.model.trust_remote_code
    folder = resolve_model_path(policy.path, weights=False, key=policy.key)
    model = check_model_folder(folder, setting=policy.setting, trust_remote_code=trusted, weights=False)
    return total_steps(config, load_run_prompts(training, model, needs)[0])


@contextmanager
def policy_engine(plan: Plan[RunConfig], device: str = "cpu") -> Iterator[FSDPEngine]:
    """The policy as it trains, on one rank."""
    settings = plan.ranks("actor")
    path = resolve_model_path(settings.model.path, key=settings.model.key)
    model = replace(settings.model, path=path, sequence_parallel_size=1)
    with alone(device):
        yield replace(settings, device=device).make_engine(model)


# --- what differs ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Difference:
    """The first number of a column, or the metric, that is not what the run had.

    Attributes:
        row: of the batch; None for a metric.
        token: of the response; None where the row has one number.
    """

    name: str
    recorded: float
    computed: float
    row: int | None = None
    token: int | None = None


def first_difference(recorded: Mapping[str, Any], computed: Mapping[str, Any], tolerance: float) -> Difference | None:
    """The first number that differs, by the order of the computed columns, then of rows and tokens.

    Args:
        recorded: the columns of the run's batch, or metrics.
        computed: some of them.
        tolerance: up to which numbers count as equal, relative to numbers above 1; nan equals nan.
    """
    for name, column in computed.items():
        if name not in recorded:
            continue
        now, before = _values(column), _values(recorded[name])
        if len(now) != len(before):
            return Difference(name, len(before), len(now))
        apart = (now - before).abs() > tolerance * before.abs().clamp_min(1)
        apart |= now.isnan() != before.isnan()
        if apart.any():
            place = int(apart.nonzero()[0])
            row, token = None if isinstance(column, float) else place, None
            if isinstance(column, Ragged):
                row = int(torch.searchsorted(column.offsets, place, right=True)) - 1
                token = place - int(column.offsets[row])
            return Difference(name, float(before[place]), float(now[place]), row, token)
    return None


def _values(column: Any) -> torch.Tensor:
    return torch.as_tensor(column.values if isinstance(column, Ragged) else column, dtype=torch.float64).flatten()
