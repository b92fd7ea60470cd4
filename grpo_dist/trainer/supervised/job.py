"""The runs of `python -m grpo_dist.reward_model` and `python -m grpo_dist.sft`: workers, checkpoint and trainer."""

from __future__ import annotations

import functools
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_dist.assets import TRAINED_MODEL_KEY
from grpo_dist.config.schema_supervised import SupervisedConfig
from grpo_dist.config.supervised import REWARD_MODEL, SFT
from grpo_dist.config.supervised_layout import slots
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.trainer.model_settings import trained_model
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.record import open_record, say
from grpo_dist.trainer.run import Job
from grpo_dist.trainer.supervised.preflight import ReadyRows, preflight
from grpo_dist.trainer.supervised.rows import new_sampler
from grpo_dist.workers.cluster import is_own
from grpo_dist.workers.limits import TimeLimits

if TYPE_CHECKING:
    from grpo_dist.trainer.processes import RoleProcesses
    from grpo_dist.trainer.supervised.trainer import SupervisedTrainer
    from grpo_dist.workers.supervised import SupervisedGroup


def build(
    config: SupervisedConfig, run_dir: Path, stack: ExitStack, preemption: Preemption, ready: ReadyRows
) -> tuple[SupervisedTrainer, RoleProcesses]:
    """Start the ranks, resume from a checkpoint if there is one, and make the trainer."""
    # these import Ray, and the run has connected to it by now
    from grpo_dist.trainer.checkpoint.resume import find_resumed
    from grpo_dist.trainer.checkpoint.saver import CheckpointSaver
    from grpo_dist.trainer.processes import RoleProcesses
    from grpo_dist.trainer.supervised.trainer import SupervisedTrainer
    from grpo_dist.workers.event_loop import run
    from grpo_dist.workers.nodes import Nodes
    from grpo_dist.workers.supervised import SupervisedGroup, SupervisedWorker

    started, role = time.monotonic(), config.role
    workers = RoleProcesses(
        slots(config),
        {role: SupervisedWorker},
        TimeLimits(config.trainer.worker_timeout_s),
        run_dir,
        nodes=Nodes(config.trainer.node_wait_minutes, functools.partial(say, config), own=is_own()),
        again=ready.again,
    )
    stack.callback(workers.shutdown)
    say(config, f"starting workers: {config.world_size} {role}")
    resumed = find_resumed(config, ready.rows.identity)
    model = SupervisedGroup(workers.groups[role])
    folder = None if resumed is None else str(resumed.folder.absolute() / role)
    run(_start(config, model, ready.steps, folder))  # before trackers drop the rows after the checkpoint
    progress, trackers = open_record(config, run_dir, resumed, ready.steps, stack)
    trainer = SupervisedTrainer(
        config,
        model,
        ready.rows,
        new_sampler(config, ready.rows),
        ready.steps,
        CheckpointSaver(config, lambda: {role: model}, async_save=config.checkpoint.async_save),
        trackers,
        progress,
        preemption,
    )
    if resumed is not None:
        trainer.step = resumed.state.step
        trainer.sampler.load_state_dict(resumed.state.sampler)
        trainer.saver.resumed_from(resumed.folder, resumed.state)
    say(config, f"workers ready after {time.monotonic() - started:.1f} s")
    return trainer, workers


async def _start(config: SupervisedConfig, model: SupervisedGroup, steps: int, folder: str | None) -> None:
    """Load the model and, if the run resumes, its checkpoint."""
    from grpo_dist.trainer.supervised.settings import worker_settings
    from grpo_dist.workers.gang import find_model

    if config.trainer.nnodes > 1:
        await find_model([model.workers], config.model.path, TRAINED_MODEL_KEY)
    await model.start(worker_settings(config, steps))
    if folder is not None:
        await model.load_checkpoint(folder)


def models(config: SupervisedConfig) -> list[ModelSettings]:
    """The model that is trained."""
    return [trained_model(config)]


REWARD_MODEL_JOB = Job(REWARD_MODEL, preflight, build, models)
SFT_JOB = Job(SFT, preflight, build, models)
