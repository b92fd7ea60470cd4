"""The composition root: starts the roles of a config, and makes their trainer.

All that can be checked without Ray has been checked before (checks/). The roles start at the same time, except
engines that share GPUs with other roles: these start first, because vLLM measures the free memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_dist.checks.all_checks import Ready
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.errors import GrpoDistError
from grpo_dist.plan.commands import command_of
from grpo_dist.plan.placement import slots
from grpo_dist.plan.plan import Plan, make_plan
from grpo_dist.plan.roles import models_of, roles_of
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.runtime.event_loop import TimeLimits, blocking, run
from grpo_dist.runtime.group import DATA_STAYS_IN_STORE, WorkerGroup
from grpo_dist.runtime.nodes import Nodes, RestartBudget, is_own
from grpo_dist.runtime.process import Address, check_shared, shared_environment
from grpo_dist.runtime.resources import nodes_of, release, reserve
from grpo_dist.sandbox.base import given
from grpo_dist.trainer.checkpoint.saver import Group, Resumed, find_resumed, load_checkpoint, read_finished
from grpo_dist.trainer.loop import TrainingLoop
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.record import open_record, say
from grpo_dist.trainer.run_prompts import template_kwargs, workers_agent
from grpo_dist.workers.gang import PolicyWorker, Turn, find_model
from grpo_dist.workers.roles import Roles
from grpo_dist.workers.scorer import RewardSettings

# Ray's limit on concurrent calls of one rollout worker; the engine itself queues what it cannot run yet.
MAX_PROMPTS_IN_FLIGHT = 10_000


def start_run(
    config: JobConfig, run_dir: Path, stack: ExitStack, preemption: Preemption, ready: Ready[Any]
) -> TrainingLoop:
    """Start the roles, resume from a checkpoint if there is one, and make the trainer."""
    started, plan = time.monotonic(), make_plan(config, ready.steps)
    roles = spawn_roles(plan, stack, again=ready.again)
    counts = ", ".join(f"{len(group.present)} {group.role}" for group in roles.workers)
    say(config, f"starting workers: {counts}")
    resumed = find_resumed(config, ready.data.identity)
    start_roles(plan, roles)
    finished = restore_roles(plan, roles, resumed)  # before trackers drop the rows after the checkpoint
    progress, trackers = open_record(config, run_dir, resumed, ready.steps, stack)
    trainer: TrainingLoop = _load(command_of(config).trainer)(plan, roles, ready.data, trackers, progress, preemption)
    if resumed is not None:
        trainer.restore(resumed, finished)
    say(config, f"workers ready after {time.monotonic() - started:.1f} s")
    return trainer


# --- processes -----------------------------------------------------------------------------------------------------
def spawn_roles(plan: Plan[JobConfig], stack: ExitStack, *, again: bool = False) -> Roles:
    """Reserve and start the processes of all roles; they import what they need while the driver looks for a checkpoint.

    Args:
        again: whether the run has had all processes before: then a machine may be lost, for which another one may come.

    Raises:
        ConfigError: the cluster does not have the resources, or its nodes do not share the run directory.
    """
    config, wanted = plan.config, slots(plan.config)
    nodes = Nodes(config.trainer.node_wait_minutes, functools.partial(say, config), own=is_own())
    reserved, bundles = run(nodes.reserve_again(wanted)) if again else reserve(wanted)
    stack.callback(release, reserved)
    required = {bundle.group for part in bundles.values() for bundle in part if bundle.required}
    check_shared(config.trainer.record_dir.absolute(), nodes_of(required))
    replaced = config.trainer.max_worker_restarts if isinstance(config, RunConfig) else 0
    roles = Roles({}, RestartBudget(replaced, nodes))
    stack.callback(end_roles, roles)
    stack.enter_context(given(config.sandbox.model_dump() if isinstance(config, RunConfig) else {}))
    shared, count = shared_environment(os.environ), plan.place.num_threads.get("rollout", 1)
    # for OpenMP in vLLM's kernels; Ray sets OMP_NUM_THREADS=1 for workers of up to one CPU
    threads = {"OMP_NUM_THREADS": str(count)} if plan.place.device == "cpu" and count > 1 else {}
    for row in roles_of(config):
        worker, size, is_rollout = _load(row.worker), len(bundles[row.name]), row.name == "rollout"
        # only engines take many calls at a time, and read the number of threads from their environment
        workers = WorkerGroup.spawn(
            row.name,
            worker,
            bundles[row.name],
            args=[(rank, size) if issubclass(worker, PolicyWorker) else () for rank in range(size)],
            limits=time_limits(config),
            env=DATA_STAYS_IN_STORE | (threads if is_rollout else {}),
            shared=shared,
            max_concurrency=MAX_PROMPTS_IN_FLIGHT if is_rollout else 1,
        )
        # one that trains cannot replace its processes
        roles.groups[row.name] = _load(row.group)(workers, *(() if row.trains else (roles.restarts,)))
    turn = Turn(roles.rollout.begin_update if plan.place.engines_sleep else None)
    for name in set(roles.gangs).intersection(plan.place.sharing):
        roles.gangs[name].turn = turn
    return roles


def end_roles(roles: Roles) -> None:
    """Stop the engines politely, then end every process."""
    if "rollout" in roles.groups:
        workers = roles.rollout.workers
        with contextlib.suppress(GrpoDistError):  # an engine that is dead or hangs is killed below
            workers.gather(workers.submit_all("shutdown", "shutdown"), timeout_s=10)
    roles.restarts.nodes.close()
    for group in roles.workers:
        group.kill()


# --- models and engines --------------------------------------------------------------------------------------------
@blocking
async def start_roles(plan: Plan[Any], roles: Roles) -> None:
    """Load models and engines, and wait until every process is ready."""
    config, place = plan.config, plan.place
    if config.trainer.nnodes > 1:
        await _find_models(config, roles)

    async def load(names: Iterable[str]) -> None:
        for name in names:
            await roles.gangs[name].start(plan.ranks(name))

    # on shared GPUs one after the other: what is offloaded is there while it loads
    together = [name for name in roles.gangs if name in place.in_turns]
    gangs = [together, *([name] for name in roles.gangs if name not in together)]
    if not isinstance(config, RunConfig):
        await asyncio.gather(*map(load, gangs))
        return
    agent, kwargs = workers_agent(config), template_kwargs(config)
    engines = [plan.engine(i, agent, kwargs) for i in range(place.num_engines + place.extra_engines)]
    if place.shares_gpu and place.tensor_parallel > 1:
        engines = on_gpus_of(engines, await roles.actor.workers.call_home())
    starting = asyncio.ensure_future(roles.rollout.start(engines))
    if place.shares_gpu:  # vLLM would count the memory of roles that load meanwhile as its own
        await starting
    reward = roles.reward.start([RewardSettings.of(plan, kwargs)] * len(roles.reward.workers))
    footprints, *_ = await asyncio.gather(starting, reward, *map(load, gangs))
    roles.rollout.note_started(footprints)
    if roles.reference is not None and config.has_teacher and plan.objective.exact_kl:
        await roles.actor.take_reference_head(roles.reference)


async def _find_models(config: JobConfig, roles: Roles) -> None:
    policy, *_ = models_of(config)
    readers: dict[tuple[str, str], list[WorkerGroup]] = {}
    for row in roles_of(config):
        model = row.model(config) or policy
        readers.setdefault((model.path, model.key), []).append(roles.groups[row.name].workers)
    for (path, key), groups in readers.items():
        await find_model(groups, path, key)


def on_gpus_of(engines: Sequence[EngineSettings], actor: Sequence[Address]) -> list[EngineSettings]:
    """The engines, each on the GPUs of as many actor ranks as it has processes: Ray gives it a share of the first."""
    size = engines[0].rollout.tensor_model_parallel_size
    gpus = [gpu for address in actor for gpu in address.gpus]
    return [replace(engine, gpus=tuple(gpus[i * size : (i + 1) * size])) for i, engine in enumerate(engines)]


def restore_roles(plan: Plan[Any], roles: Roles, resumed: Resumed | None) -> dict[str, Group]:
    """Have started workers load the checkpoint from which the run resumes, if there is one.

    Returns its finished groups of later steps, by uid; none if the config has changed.
    """
    if resumed is None:
        return {}
    run(load_checkpoint(resumed, plan.config, roles.gangs))
    if not isinstance(plan.config, RunConfig):
        return {}
    if roles.reference is not None and roles.reference.has_moved and plan.objective.exact_kl:
        run(roles.actor.take_reference_head(roles.reference))
    if resumed.changes:
        return {}
    return run(read_finished(resumed.folder.absolute(), resumed.state.finished, roles.reward))


def _load(name: str) -> Any:
    return load_attribute(name, key="a row of plan/roles.py or plan/commands.py")


def time_limits(config: JobConfig) -> TimeLimits:
    """Return how long a worker may take to answer."""
    if not isinstance(config, RunConfig):
        return TimeLimits(config.trainer.worker_timeout_s)
    stages = {"start": config.actor_rollout_ref.rollout.startup_timeout_s}
    stages |= {stage: limit for stage, limit in config.trainer.stage_timeout_s.items() if limit is not None}
    return TimeLimits(config.trainer.worker_timeout_s, stages)
