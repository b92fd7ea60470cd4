"""Trains on Ray: connects, starts workers, again after losses, and ends every process, whether Ray answers or not."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from grpo_dist.checks.all_checks import Ready
from grpo_dist.config.keys import with_value
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.errors import (
    ConfigError,
    DataLost,
    GrpoDistError,
    Interrupted,
    OutOfMemory,
    RayLost,
    WorkerError,
    WorkerLost,
)
from grpo_dist.plan.commands import command_of
from grpo_dist.run.build import start_run
from grpo_dist.runtime.nodes import connect, kill_ray, watching
from grpo_dist.terminal import show
from grpo_dist.trainer.checkpoint.folder import last_checkpoint
from grpo_dist.trainer.loop import StepCallback
from grpo_dist.trainer.metrics import peak_memory
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.record import say
from grpo_dist.workers.roles import Roles

# Ray's shutdown takes a second or two, and for ever if a process of Ray hangs: after so many seconds those of a local
# cluster are killed, which ends it, and after twice as many so does this process.
DISCONNECT_S = 10.0


def train(
    config: JobConfig,
    address: str,
    run_dir: Path,
    preemption: Preemption,
    ready: Ready[Any],
    on_step: StepCallback | None,
    on_forced_end: Callable[[RayLost | Interrupted], None],
) -> int:
    """Connect to Ray, train and disconnect (see `run.run`); returns the first step that this run has recorded."""
    checkpoints = Path(config.trainer.default_local_dir).absolute()
    force = functools.partial(_end_by_force, checkpoints, preemption, on_forced_end)
    with ExitStack() as stack:
        stack.callback(_disconnect, preemption, force)
        message = connect(address, config.ray_kwargs.ray_init.num_cpus)
        preemption.listen()  # again: Ray's own handler, put in its place, aborts the process
        say(config, f"{message}; run directory: {run_dir}")
        for note in ready.notes:
            say(config, note)
        stack.enter_context(watching(force))
        return _train(config, run_dir, preemption, ready, on_step)


def _end_by_force(
    checkpoints: Path,
    preemption: Preemption,
    tell: Callable[[RayLost | Interrupted], None],
    what: str,
    failure: BaseException | None = None,
) -> None:
    """End this process and those of a local cluster, because `what` of Ray is lost or hangs; the run had ended with
    `failure` before.
    """
    error: RayLost | Interrupted = RayLost(
        f"{what} does not answer any more: it hangs, was killed (out of memory, `ray stop`), or its machine is lost. "
        "The run ends, since it cannot go on without it; started again it goes on from its last checkpoint. Where the "
        "cluster is not this run's own (ray_kwargs.ray_init.address), start Ray again first (`ray start --head`)"
    )
    if preemption.asked:
        show(f"\n{preemption.name}: {what} does not answer any more, so nothing more could be saved\n", sys.stderr)
        error = preemption.interrupt()
    elif failure is not None:
        error.add_note(f"before that the run had ended with {type(failure).__name__}: {failure}")
    error.checkpoint = last_checkpoint(checkpoints)
    tell(error)
    sys.stderr.flush()
    kill_ray()
    os._exit(error.exit_code)


def _train(
    config: JobConfig, run_dir: Path, preemption: Preemption, ready: Ready[Any], on_step: StepCallback | None
) -> int:
    """Start workers and train. If a lost worker held what is trained, start all of them again from the last checkpoint.

    With `trainer.halve_on_out_of_memory` that is also done if a GPU runs out of memory, with the responsible setting
    halved. Returns what `train` does.

    Raises:
        WorkerLost, DataLost: all workers have been started again `trainer.max_actor_restarts` times.
        OutOfMemory: likewise; or halving is off, or the setting cannot be halved.
    """
    restarts, present, last, first_step = 0, config, None, 0
    lost: GrpoDistError
    while True:
        trainer = None
        with ExitStack() as stack:
            try:
                trainer = start_run(present, run_dir, stack, preemption, ready)
                if restarts == 0 and trainer.step > 0 and not config.trainer.val_only:
                    first_step = trainer.step + 1
                trainer.on_step = on_step
                trainer.fit()
                _tell_memory(config, trainer.roles)
                trainer.trackers.close()
                trainer.progress.close()
                return first_step
            except ConfigError as error:
                if restarts and trainer is None:  # its config was right when it began: a machine lacks what it had
                    error.exit_code = 1
                raise
            except OutOfMemory as error:
                smaller = halved(present, error.setting) if config.trainer.halve_on_out_of_memory else None
                if smaller is None or restarts == config.trainer.max_actor_restarts:
                    raise
                present, lost = smaller, error
                say(config, f"trainer.halve_on_out_of_memory=true: half of {'='.join(map(str, error.setting or ()))}")
            except (WorkerLost, DataLost) as error:
                if trainer is None:  # lost at the first start it would most likely be lost again: too large a model
                    goes_on = restarts > 0
                else:
                    goes_on = isinstance(error, DataLost) or error.role in trainer.saver.holders()
                if preemption.asked:
                    say(config, f"{preemption.name}: no checkpoint could be written: {error}")
                    preemption.release()
                if not goes_on or restarts == config.trainer.max_actor_restarts:
                    raise
                lost = error
                preemption.held = False  # the new workers are those of a finished step
        restarts, ready = restarts + 1, replace(ready, again=True)
        last = last if trainer is None else trainer.saver.last
        present = _from_last_checkpoint(present, last)
        where = last or "the beginning: there is no checkpoint yet"
        count = f"{restarts} of trainer.max_actor_restarts={config.trainer.max_actor_restarts}"
        say(config, f"{lost}\nstarting all workers again from {where} ({count})")


def halved(config: JobConfig, setting: tuple[str, int] | None) -> JobConfig | None:
    """Return the config with one setting (key, value) halved, for a run that goes on after a GPU ran out of memory.

    None if there is nothing to halve, or half the value is not valid: less than one sequence, or fewer tokens than the
    longest sequence.
    """
    if setting is None or setting[1] < 2:
        return None
    key, value = setting
    smaller: JobConfig = with_value(config, key, value // 2)
    return None if any(key in problem.keys for problem in command_of(config).problems(smaller)) else smaller


def _from_last_checkpoint(config: JobConfig, folder: Path | None) -> JobConfig:
    """The config with which a run resumes from the checkpoint `folder`, or starts anew if that is None.

    If that checkpoint has been damaged since, the run resumes from the one before it, as at any start.
    """
    run_dir = Path(config.trainer.default_local_dir).absolute()
    if folder is None:
        where = {"resume_mode": "disable", "resume_from_path": None}
    elif folder.absolute() == last_checkpoint(run_dir):
        # the run has been checked at its start, and until it saves, the checkpoint may be one of another config
        where = {"resume_mode": "force", "resume_from_path": None}
    else:
        where = {"resume_mode": "resume_path", "resume_from_path": str(folder)}
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=where)})


def _tell_memory(config: JobConfig, roles: Roles) -> None:
    try:
        memory = peak_memory(roles.workers)
    except WorkerError as error:  # the run is done: it does not need them any more
        say(config, f"peak memory is not known: {error}")
        return
    peaks = [f"{key.rpartition('/')[2]} {size:.2f}{' on its GPU' * ('_gpu_' in key)}" for key, size in memory.items()]
    say(config, f"most memory that a process of each role held, GiB: {', '.join(peaks)}")


def _disconnect(preemption: Preemption, force: Callable[..., None]) -> None:
    """Leave Ray, or end the local cluster, whether it answers or not."""
    preemption.ignore()
    last = ["the Ray cluster", sys.exception()]
    limits = [threading.Timer(DISCONNECT_S, kill_ray), threading.Timer(2 * DISCONNECT_S, force, last)]
    for timer in limits:
        timer.daemon = True
        timer.start()
    try:
        ray.shutdown()
    finally:
        for timer in limits:
            timer.cancel()
