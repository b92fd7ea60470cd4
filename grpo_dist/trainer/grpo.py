"""The run of `python -m grpo_dist.main`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_dist.config.grpo import GRPO
from grpo_dist.config.placement import placement
from grpo_dist.config.schema import RunConfig
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.trainer.model_settings import actor_model, critic_model, reference_model
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.preflight import ReadyPrompts, preflight
from grpo_dist.trainer.record import open_record, say
from grpo_dist.trainer.run import Job
from grpo_dist.trainer.run_prompts import new_sampler

if TYPE_CHECKING:
    from grpo_dist.trainer.build import Workers
    from grpo_dist.trainer.trainer import GRPOTrainer


def build(
    config: RunConfig, run_dir: Path, stack: ExitStack, preemption: Preemption, ready: ReadyPrompts
) -> tuple[GRPOTrainer, Workers]:
    """Start the workers, resume from a checkpoint if there is one, and make the trainer."""
    # these import Ray, and the run has connected to it by now
    from grpo_dist.trainer.build import Workers, build_trainer, restore_roles
    from grpo_dist.trainer.checkpoint.resume import find_resumed

    started, steps = time.monotonic(), ready.steps
    workers = Workers(config, again=ready.again)
    stack.callback(workers.shutdown)
    say(
        config,
        "starting workers: " + ", ".join(f"{len(group.present)} {group.role}" for group in workers.groups.values()),
    )
    resumed = find_resumed(config, ready.prompts.identity)
    roles = workers.start(steps)
    restored = restore_roles(config, roles, resumed)  # before trackers drop the rows after the checkpoint
    progress, trackers = open_record(config, run_dir, resumed, steps, stack)
    trainer = build_trainer(
        config,
        roles,
        # from the first batch, also after a restart
        replace(ready.prompts, sampler=new_sampler(config, ready.prompts.train)),
        steps,
        resumed=resumed,
        restored=restored,
        trackers=trackers,
        progress=progress,
        preemption=preemption,
    )
    say(config, f"workers ready after {time.monotonic() - started:.1f} s")
    return trainer, workers


def models(config: RunConfig) -> list[ModelSettings]:
    """The models of the actor, the teacher and the critic; a reward model is checked by its folder."""
    place = placement(config)
    found = [actor_model(config, place)]
    if config.has_teacher:
        found.append(reference_model(config, place))
    if config.needs_critic:
        found.append(critic_model(config, place))
    return found


GRPO_JOB = Job(GRPO, preflight, build, models)
