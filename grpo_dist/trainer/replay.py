"""Computes a recorded training step again: rewards, advantages and, from the checkpoint before it, the update.

What a run has recorded of a step (recorded_step.py) is all that it was made of, but for the weights. So it can be
computed again anywhere, without Ray, without rollout engines and on CPU, and compared number by number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from grpo_dist.algorithms.baselines import AgentBaselines
from grpo_dist.algorithms.settings import ObjectiveSettings
from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import check_model_folder
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.prompts import Prompt, add_system_prompt
from grpo_dist.engines.rendezvous import alone
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plan.placement import placement
from grpo_dist.plan.roles import ROLES, models_of
from grpo_dist.protocol import DataProto, metric_values
from grpo_dist.protocol.fields import EXTRA, columns_for
from grpo_dist.protocol.sequences import ROUTES
from grpo_dist.rewards.contract import RowNeeds
from grpo_dist.tracking.jsonl import METRICS
from grpo_dist.trainer.checkpoint.folder import others, own_checkpoints
from grpo_dist.trainer.loop import mini_batches
from grpo_dist.trainer.loss_settings import objective_settings, target_settings
from grpo_dist.trainer.recorded_step import Difference, Recorded
from grpo_dist.trainer.rollout.job import group_seed
from grpo_dist.trainer.run_prompts import load_run_prompts, read_prompts, total_steps
from grpo_dist.trainer.settings import rank_settings, reward_settings
from grpo_dist.workers.gang import averaged
from grpo_dist.workers.reward import RewardWorker
from grpo_dist.workers.scorer import Task

LR_TOLERANCE = 1e-6  # relative
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


@contextmanager
def reward_worker(config: RunConfig) -> Iterator[RewardWorker]:
    """A reward process's work in this process; the function itself runs in a child, as in a run."""
    worker = RewardWorker()
    settings = replace(reward_settings(config), max_steps=config.trainer.total_training_steps)
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
    prompts = _prompts(recorded, worker)
    given = data["episode_reward"].numpy() if "episode_reward" in data.columns() else None
    parts, labels = [], []
    uids = data["uid"]
    starts = [0, *(i for i in range(1, len(uids)) if uids[i] != uids[i - 1])]
    for start, end in zip(starts, [*starts[1:], len(uids)], strict=True):
        group = data.slice(start, end)
        rewards = np.full(end - start, np.nan, np.float32) if given is None else given[start:end]
        before = int(uids[start].removeprefix("step").partition("-")[0]) - 1
        task = Task.of(prompts[uids[start]], model_scores=_model_scores(group), step=before)
        label, _, scored = worker.score_group(group, task, rewards)
        parts.append(scored)
        labels.append(label)
    names = dict.fromkeys(name for label in labels for name in label.small if name.startswith(EXTRA))
    scored = DataProto.concat(parts)
    for name in names:
        values = [label.small.get(name, np.full(label.num_rows, np.nan, np.float32)) for label in labels]
        scored.batch[name] = torch.tensor(np.concatenate(values))
    return scored


def retarget(recorded: Recorded, worker: RewardWorker, scores: DataProto) -> DataProto:
    """Compute the advantages again, from these scores.

    Args:
        scores: columns that take the place of the recorded ones.

    Raises:
        ConfigError: they need a column or a figure that the run has not recorded.
    """
    config, settings = recorded.config, target_settings(recorded.config)
    if "agent_baselines" in settings.needs:
        settings = settings.with_agent_baselines(_agent_baselines(recorded))
    data = DataProto({**recorded.sampled.batch, **scores.batch}, recorded.data.non_tensor_batch)
    needed = [*settings.columns, *(["reward_baseline"] if "reward_baselines" in settings.needs else [])]
    if missing := [name for name in needed if name not in data.columns()]:
        raise ConfigError(
            f"{recorded.run_dir}: the advantages of step {recorded.step} need {', '.join(missing)}, which is not "
            "recorded"
        )
    seed = group_seed(config.trainer.seed, recorded.step, -1)
    small = {name: column.numpy() for name, column in data.batch.items() if isinstance(column, torch.Tensor)}
    *_, targets = worker.targets_of(data, small, settings, _kl_coef(recorded), seed)
    return targets


def weights_before(recorded: Recorded) -> Path | None:
    """The checkpoint before the step; None: the step is the first one, and its weights are the model's own.

    Raises:
        ConfigError: there is none.
    """
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
    with policy_engine(config, _num_steps(config)) as engine:
        if checkpoint is not None:
            engine.load_checkpoint(checkpoint / "actor")
        size = {"micro_batch_size": config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu}
        groups = mini_batches(config, config.actor_rollout_ref.actor, data["uid"], recorded.step - 1)
        results = []
        log_probs = DataProto()
        if config.old_log_probs_from != "rollout":
            columns = engine.compute_columns(data, ("log_probs",), **size)
            log_probs = DataProto.from_dict({"old_log_probs": columns["log_probs"]})
        for rows in groups if not recorded.only_critic_learned else ():
            results.append(engine.train_mini_batch(data.index(rows), objective=objective, **size).metrics)
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
    """The loss, and the columns of the batch that the update reads."""
    config, data, objective = recorded.config, recorded.data, objective_settings(recorded.config)
    if config.actor_rollout_ref.actor.entropy_target is not None:
        objective = objective.with_entropy_coeff(_entropy_coeff(recorded))
    needed = (*objective.columns, *((ROUTES,) if config.replays_routes else ()))
    if missing := [name for name in needed if name not in data.columns()]:
        raise ConfigError(f"{recorded.run_dir}: the update needs {', '.join(missing)}, which is not recorded")
    return objective, data.select((*columns_for(data.columns(), "forward"), *objective.columns))


def metric_difference(
    recorded: Mapping[str, float], computed: Mapping[str, float], tolerance: float
) -> Difference | None:
    """The first of `UPDATE_METRICS` that differs; as in `first_difference`."""
    for name in UPDATE_METRICS:
        if name in recorded and name in computed:
            before, now = recorded[name], computed[name]
            if abs(now - before) > tolerance * max(abs(before), 1):
                return Difference(name, before, now)
    return None


def _prompts(recorded: Recorded, worker: RewardWorker) -> dict[str, Prompt]:
    """The training row of each group."""
    config = recorded.config
    files = config.data.train_files
    rows = read_prompts(config, "data.train_files", files, config.data.train_max_samples, worker.scorer.needs)
    if config.data.system_prompt is not None:
        rows, _ = add_system_prompt(rows, config.data.system_prompt)
    by_index = {prompt.index: prompt for prompt in rows}
    by_uid = {}
    for uid in dict.fromkeys(recorded.data["uid"]):
        named = _UID.fullmatch(uid)
        if named is None or int(named[1]) not in by_index:
            raise DataError(
                f"data.train_files: {uid} of step {recorded.step} is not among its {len(rows)} rows any more"
            )
        by_uid[uid] = by_index[int(named[1])]
    return by_uid


def _model_scores(group: DataProto) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(EXTRA): column.numpy()
        for name, column in group.batch.items()
        if name.startswith(f"{EXTRA}rm_") and isinstance(column, torch.Tensor)
    }


def _kl_coef(recorded: Recorded) -> float:
    """The coefficient of the KL penalty in the reward of the step.

    Raises:
        ConfigError: it moves, and the step's is not recorded.
    """
    control, name = recorded.config.algorithm.kl_ctrl, "actor/reward_kl_penalty_coeff"
    if name in recorded.metrics:
        return recorded.metrics[name]
    if recorded.config.algorithm.use_kl_in_reward and control.type == "adaptive":
        raise ConfigError(
            f"step {recorded.step}: algorithm.kl_ctrl.type=adaptive, and its {name} is not in {recorded.run_dir}/"
            f"{METRICS}; replay a step that has it there"
        )
    return control.kl_coef


def _agent_baselines(recorded: Recorded) -> dict[int, float]:
    """The baselines of rae in the step.

    Raises:
        ConfigError: they are not recorded, and the step is not the first one, where they are 0.
    """
    baselines = AgentBaselines.recorded(recorded.metrics)
    if not baselines and recorded.step > 1:
        raise ConfigError(
            f"step {recorded.step}: algorithm.adv_estimator=rae goes by the scores of the steps before, and {METRICS} "
            f"in {recorded.run_dir} has none; step 1 needs none"
        )
    return baselines


def _entropy_coeff(recorded: Recorded) -> float:
    """The weight of the entropy bonus in the step.

    Raises:
        ConfigError: it moves, and the step's is not recorded.
    """
    name = "actor/entropy_coeff"
    if name not in recorded.metrics:
        raise ConfigError(
            f"step {recorded.step}: actor_rollout_ref.actor.entropy_target is set, and the step's {name} is not in "
            f"{recorded.run_dir}/{METRICS}; replay a step that has it there"
        )
    return recorded.metrics[name]


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
def policy_engine(config: RunConfig, num_steps: int = 1, device: str = "cpu") -> Iterator[FSDPEngine]:
    """The policy as it trains, on one rank."""
    settings = rank_settings(config, ROLES["actor"], placement(config), num_steps)
    path = resolve_model_path(settings.model.path, key=settings.model.key)
    model = replace(settings.model, path=path, sequence_parallel_size=1)
    with alone(device):
        yield replace(settings, device=device).make_engine(model)
