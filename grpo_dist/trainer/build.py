"""The composition root: starts the workers of a config, and makes their trainer.

All that can be checked without Ray has been checked before (preflight.py). The roles start at the same time, except
engines that share GPUs with other roles: these start first, because vLLM measures the free memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from grpo_dist.assets import CRITIC_KEY, POLICY_KEY, REWARD_MODEL_KEY, TEACHER_KEY
from grpo_dist.config.node_layout import slots
from grpo_dist.config.placement import Placement, placement
from grpo_dist.config.schema import RunConfig
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.errors import GrpoDistError
from grpo_dist.tracking.base import Trackers
from grpo_dist.tracking.console import Progress
from grpo_dist.trainer.checkpoint.finished_groups import Group
from grpo_dist.trainer.checkpoint.resume import Resumed, load_checkpoint
from grpo_dist.trainer.checkpoint.saver import CheckpointSaver
from grpo_dist.trainer.loss_settings import objective_settings, target_settings
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.processes import RoleProcesses
from grpo_dist.trainer.record import say
from grpo_dist.trainer.retraining import Retraining
from grpo_dist.trainer.roles import Roles
from grpo_dist.trainer.rollout.pump import LogProbSource, RolloutPump
from grpo_dist.trainer.rollout.sampling import TrainingSampler
from grpo_dist.trainer.run_prompts import Prompts
from grpo_dist.trainer.settings import (
    critic_settings,
    engine_settings,
    kl_controller,
    policy_settings,
    reference_settings,
    reward_model_settings,
    reward_settings,
    sampling_settings,
    time_limits,
    value_settings,
)
from grpo_dist.trainer.trainer import GRPOTrainer
from grpo_dist.workers.cluster import is_own
from grpo_dist.workers.event_loop import blocking, run
from grpo_dist.workers.gang import ActorGroup, CriticGroup, ReferenceGroup, find_model
from grpo_dist.workers.nodes import Nodes
from grpo_dist.workers.policy import ActorWorker, CriticWorker, PolicyWorker
from grpo_dist.workers.process import Address, Process
from grpo_dist.workers.restarts import RestartBudget
from grpo_dist.workers.reward import RewardWorker
from grpo_dist.workers.reward_model import RewardModelGroup, RewardModelWorker
from grpo_dist.workers.reward_pool import RewardPool
from grpo_dist.workers.rollout import RolloutWorker
from grpo_dist.workers.rollout_group import RolloutGroup
from grpo_dist.workers.weight_transport import weight_transport

# The worker class of each role.
WORKERS: Mapping[str, type[Process]] = {
    "rollout": RolloutWorker,
    "actor": ActorWorker,
    "ref": PolicyWorker,
    "reward_model": RewardModelWorker,
    "critic": CriticWorker,
    "reward": RewardWorker,
}
# Ray's limit on concurrent calls of one rollout worker; the engine itself queues what it cannot run yet.
MAX_PROMPTS_IN_FLIGHT = 10_000


class Workers(RoleProcesses):
    """All worker processes of a GRPO run, from reservation to shutdown."""

    def __init__(self, config: RunConfig, *, again: bool = False) -> None:
        """Start the processes; they import what they need while the driver reads the prompts."""
        self.config, self.place = config, placement(config)
        # only engines take many calls at a time, and read the number of threads from their environment
        super().__init__(
            slots(config),
            WORKERS,
            time_limits(config),
            config.trainer.record_dir.absolute(),
            env={"rollout": _thread_environment(self.place)},
            concurrency={"rollout": MAX_PROMPTS_IN_FLIGHT},
            nodes=Nodes(config.trainer.node_wait_minutes, functools.partial(say, config), own=is_own()),
            again=again,
        )

    @blocking
    async def start(self, num_steps: int) -> Roles:
        """Load models and engines, and wait until every process is ready."""
        config, place = self.config, self.place
        groups = self.groups
        if config.trainer.nnodes > 1:
            await self._find_models()
        restarts = RestartBudget(config.trainer.max_worker_restarts, self.nodes)
        roles = Roles(
            ActorGroup(groups["actor"]),
            RolloutGroup(groups["rollout"], restarts),
            RewardPool(groups["reward"], restarts),
            ReferenceGroup(groups["ref"], restarts) if "ref" in groups else None,
            restarts,
            RewardModelGroup(groups["reward_model"], restarts) if "reward_model" in groups else None,
            CriticGroup(groups["critic"]) if "critic" in groups else None,
        )
        engines = [engine_settings(config, place, i) for i in range(place.num_engines + place.extra_engines)]
        if place.shares_gpu and place.tensor_parallel > 1:
            engines = on_gpus_of(engines, await groups["actor"].call_home())
        starting = asyncio.ensure_future(roles.rollout.start(engines))
        if place.shares_gpu:  # vLLM would count the memory of roles that load meanwhile as its own
            await starting
        others = [
            roles.actor.start(policy_settings(config, place, num_steps)),
            roles.reward.start([reward_settings(config)] * len(groups["reward"])),
        ]
        if roles.ref is not None:
            others.append(roles.ref.start(reference_settings(config, place)))
        if roles.reward_model is not None:
            others.append(roles.reward_model.start(reward_model_settings(config, place)))
        if roles.critic is not None:
            others.append(roles.critic.start(critic_settings(config, place, num_steps)))
        footprints, *_ = await asyncio.gather(starting, *others)
        roles.rollout.note_started(footprints)
        if roles.ref is not None and config.has_teacher and objective_settings(config).exact_kl:
            await roles.actor.take_reference_head(roles.ref)
        return roles

    async def _find_models(self) -> None:
        """Find or download every model once per node."""
        config, groups = self.config, self.groups
        beside = {
            "ref": (config.actor_rollout_ref.ref.model.path, TEACHER_KEY),
            "reward_model": (config.reward_model.model.path, REWARD_MODEL_KEY),
            "critic": (config.critic.model.path, CRITIC_KEY),
        }
        of_policy = [group for role, group in groups.items() if role not in beside or beside[role][0] is None]
        await find_model(of_policy, config.actor_rollout_ref.model.path, POLICY_KEY)
        for role, (path, key) in beside.items():
            if role in groups and path is not None:
                await find_model([groups[role]], path, key)

    def shutdown(self) -> None:
        """Stop the engines politely, then end every process."""
        rollout = self.groups["rollout"]
        with contextlib.suppress(GrpoDistError):  # an engine that is dead or hangs is killed below
            rollout.gather(rollout.submit_all("shutdown", "shutdown"), timeout_s=10)
        super().shutdown()


def on_gpus_of(engines: Sequence[EngineSettings], actor: Sequence[Address]) -> list[EngineSettings]:
    """The engines, each on the GPUs of as many actor ranks as it has processes: Ray gives it a share of the first."""
    size = engines[0].tensor_parallel_size
    gpus = [gpu for address in actor for gpu in address.gpus]
    return [replace(each, gpus=tuple(gpus[i * size : (i + 1) * size])) for i, each in enumerate(engines)]


def restore_roles(config: RunConfig, roles: Roles, resumed: Resumed | None) -> dict[str, Group]:
    """Have started workers load the checkpoint from which the run resumes, if there is one.

    Returns:
        The finished groups of later steps, by uid.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
    """
    if resumed is None:
        return {}
    exact_kl = objective_settings(config).exact_kl
    return run(load_checkpoint(resumed, roles, exact_kl=exact_kl, has_teacher=config.has_teacher))


def build_trainer(
    config: RunConfig,
    roles: Roles,
    prompts: Prompts,
    steps: int,
    *,
    resumed: Resumed | None,
    restored: Mapping[str, Group],
    trackers: Trackers,
    progress: Progress,
    preemption: Preemption,
) -> GRPOTrainer:
    """A trainer on started workers, in the state of the checkpoint from which the run resumes.

    `restored` is what `restore_roles` has returned.
    """
    rollout, reward = config.actor_rollout_ref.rollout, config.reward
    place, sources = placement(config), _log_prob_sources(config, roles)
    pump = RolloutPump(
        roles.rollout,
        roles.reward,
        sources,
        model_scores=None if roles.reward_model is None else roles.reward_model.score,
        reward_timeout_s=reward.timeout_s,
        max_failure_rate=reward.max_failure_rate,
        max_episode_failure_rate=config.actor_rollout_ref.rollout.agent.max_failure_rate,
    )
    sampling, val_sampling = sampling_settings(config)
    trainer = GRPOTrainer(
        config=config,
        roles=roles,
        prompts=prompts,
        total_steps=steps,
        pump=pump,
        sampler=TrainingSampler(config, pump, prompts.train, prompts.sampler, sampling, list(sources)),
        val_sampling=val_sampling,
        targets=target_settings(config),
        objective=objective_settings(config),
        value_objective=value_settings(config),
        kl_controller=kl_controller(config.algorithm.kl_ctrl),
        transport=weight_transport(
            rollout.checkpoint_engine.resolved_backend(place.device, shares_gpu=place.shares_gpu),
            workers_per_engine=place.tensor_parallel,
            collective_timeout_s=config.actor_rollout_ref.nccl_timeout,
        ),
        saver=CheckpointSaver(
            config,
            roles.holders,
            async_save=config.actor_rollout_ref.actor.checkpoint.async_save,
            reward=roles.reward,
        ),
        trackers=trackers,
        progress=progress,
        preemption=preemption,
    )
    if config.reward_model.is_retrained and roles.reward_model is not None:
        trainer.retraining = Retraining(config, roles.reward_model, roles.reward, progress.message)
    if resumed is not None:
        _restore_trainer(trainer, resumed, restored)
    return trainer


def _restore_trainer(trainer: GRPOTrainer, resumed: Resumed, restored: Mapping[str, Group]) -> None:
    """Set the state that the trainer had when the checkpoint was written."""
    state, sampler = resumed.state, trainer.sampler
    trainer.prompts.sampler.load_state_dict(state.sampler)
    sampler.load_state_dict(state.ledger)
    sampler.restored = dict(restored)
    trainer.step, trainer.weight_version = state.step, state.weight_version - 1
    trainer.saver.resumed_from(resumed.folder, state)
    if trainer.retraining is not None:
        trainer.retraining.resumed_from(resumed.folder, state.step)
    if trainer.kl_controller.target_kl is not None:  # a fixed coefficient is the config's
        trainer.kl_controller.coef = state.kl_coef


def _log_prob_sources(config: RunConfig, roles: Roles) -> dict[str, LogProbSource]:
    """What computes log-probs and values while groups are generated: the reference, and the actor and critic if they
    stand still then.
    """
    sources: dict[str, LogProbSource] = {}
    actor, ref, in_step = roles.actor, roles.ref, config.trainer.max_staleness == 0
    if ref is not None:
        sources["ref"] = functools.partial(ref.compute_log_probs, "ref_log_prob")
    if in_step and config.actor_is_reference:
        sources["ref"] = functools.partial(actor.compute_log_probs, "ref_log_prob", method="compute_reference")
    if in_step and config.needs_old_log_probs:
        sources["old_log_prob"] = functools.partial(actor.compute_log_probs, "old_log_prob")
    if in_step and roles.critic is not None:
        sources["values"] = functools.partial(roles.critic.compute_log_probs, "values")
    return sources


def _thread_environment(place: Placement) -> dict[str, str]:
    """What must be set before an engine's process starts. vLLM's kernels ask OpenMP, and Ray itself sets
    OMP_NUM_THREADS=1 for workers of up to one CPU.
    """
    threads = place.num_threads["rollout"]
    return {"OMP_NUM_THREADS": str(threads)} if place.device == "cpu" and threads > 1 else {}
