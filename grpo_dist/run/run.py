"""Runs a checked config: connects to Ray, starts workers, trains, prints the summary, and ends every process."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_dist.checks.all_checks import check_all
from grpo_dist.checks.models import build_models, checked_models
from grpo_dist.checks.result import Ready
from grpo_dist.checks.run_folder import is_finished, nothing_to_train
from grpo_dist.config.command import halved
from grpo_dist.config.run_code import ENGINE, FLAG, REWARD, code_of_run
from grpo_dist.config.schema import RunConfig
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
from grpo_dist.runtime.cluster import connect
from grpo_dist.terminal import show
from grpo_dist.tracking.jsonl import METRICS as METRICS
from grpo_dist.tracking.jsonl import read_metrics
from grpo_dist.tracking.summary import format_summary
from grpo_dist.trainer.checkpoint.folder import last_checkpoint
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.record import EXPORTED, make_run_dir, run_lock, say, write_config

if TYPE_CHECKING:
    from grpo_dist.roles.roles import Roles
    from grpo_dist.trainer.loop import StepCallback


# Ray's shutdown takes a second or two, and for ever if a process of Ray hangs: after so many seconds those of a local
# cluster are killed, which ends it, and after twice as many so does this process.
DISCONNECT_S = 10.0


def tell_end(error: RayLost | Interrupted) -> None:
    """Say what ends the process."""
    show(f"\n{error}\n", sys.stderr)


def run(
    config: JobConfig,
    on_step: StepCallback | None = None,
    on_forced_end: Callable[[RayLost | Interrupted], None] = tell_end,
) -> None:
    """Train as the config says, until done or interrupted.

    If Ray itself is lost or hangs, this process ends, since whatever still calls Ray hangs: with the exit code of
    RayLost, or of Interrupted if a signal has come before.

    Args:
        config: of the run.
        on_step: called with step and metrics after each training step; what is true ends the training there.
        on_forced_end: called before that end, in another thread.

    Raises:
        GrpoDistError: the run failed; see errors.py.
        Interrupted: SIGINT or SIGTERM. (Ray's calls turn whatever a signal handler raises into a KeyboardInterrupt.)
    """
    preemption = Preemption()
    try:
        _run(config, preemption, on_step, on_forced_end)
    except KeyboardInterrupt:
        if preemption.asked:
            raise preemption.interrupt() from None
        raise


def _run(
    config: JobConfig,
    preemption: Preemption,
    on_step: StepCallback | None,
    on_forced_end: Callable[[RayLost | Interrupted], None],
) -> None:
    """Check what can be checked without Ray, then train. Every process is ended, also after an error."""
    started = time.monotonic()
    ready = check_all(config, lambda line: None, dry_run=False)
    if is_finished(config, ready.steps):
        if config.trainer.console:
            show(nothing_to_train(config, ready.steps) + "\n")
        return
    if with_factors := [row for row in checked_models(config) if row.settings.lora is not None]:
        build_models(with_factors, config.device, lambda line: None)
    run_dir = make_run_dir(config)
    with ExitStack() as stack:
        stack.callback(preemption.restore)
        preemption.listen()
        stack.enter_context(run_lock(run_dir))
        write_config(config, run_dir)
        checkpoints = Path(config.trainer.default_local_dir).absolute()
        force = functools.partial(_end_by_force, checkpoints, preemption, on_forced_end)
        stack.callback(_disconnect, preemption, force)
        ray_init, profiled = config.ray_kwargs.ray_init, bool(getattr(config.trainer, "profile_steps", None))
        message = connect(ray_init.address, ray_init.num_cpus, profiled)
        preemption.listen()  # again: Ray's own handler, put in its place, aborts the process
        say(config, f"{message}; run directory: {run_dir}")
        for note in ready.notes:
            say(config, note)
        from grpo_dist.runtime.ray_watch import watching  # imports Ray

        stack.enter_context(watching(force))
        first_step = _train(config, run_dir, preemption, ready, on_step)
    if config.trainer.console:
        hf_model = run_dir / EXPORTED if config.trainer.export_hf_model and not config.trainer.val_only else None
        seconds = time.monotonic() - started
        rows = [row for row in read_metrics(run_dir / METRICS) if row["step"] >= first_step]
        job_config = config if isinstance(config, RunConfig) else None
        shown = format_summary(
            rows, run_dir=run_dir, seconds=seconds, hf_model=hf_model, flags=_flags(config), job=job_config
        )
        show(shown + "\n")


def _flags(config: JobConfig) -> dict[str, str]:
    """The commands that would refuse the code which this run's config names, with the flag by which they take it."""
    if not isinstance(config, RunConfig):
        return {}
    takes = {"eval": (*ENGINE, *REWARD), "serve": ENGINE}
    return {command: f" {FLAG}" for command, keys in takes.items() if code_of_run(config, keys)}


def _end_by_force(
    checkpoints: Path,
    preemption: Preemption,
    tell: Callable[[RayLost | Interrupted], None],
    what: str,
    failure: BaseException | None = None,
) -> None:
    """End this process and those of a local cluster, because `what` of Ray is lost or hangs.

    `failure` is what the run had ended with before.
    """
    from grpo_dist.runtime.ray_watch import kill_ray

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
    halved.

    Returns:
        The first step that this run has recorded.

    Raises:
        WorkerLost, DataLost: all workers have been started again `trainer.max_actor_restarts` times.
        OutOfMemory: likewise; or halving is off, or the setting cannot be halved.
    """
    from grpo_dist.run.build import start_run  # it imports Ray, and the run has connected to it by now

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
                smaller = None
                if config.trainer.halve_on_out_of_memory:
                    smaller = halved(present, error.setting, command_of(config))
                if smaller is None or restarts == config.trainer.max_actor_restarts:
                    raise
                present, lost = smaller, error
                say(config, f"trainer.halve_on_out_of_memory=true: half of {'='.join(map(str, error.setting or ()))}")
            except (WorkerLost, DataLost) as error:
                if trainer is None:  # lost at the first start it would most likely be lost again: too large a model
                    goes_on = restarts > 0
                else:
                    goes_on = isinstance(error, DataLost) or trainer.holds_state(error.role)
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
    from grpo_dist.trainer.metrics import peak_memory

    try:
        memory = peak_memory(roles.workers)
    except WorkerError as error:  # the run is done: it does not need them any more
        say(config, f"peak memory is not known: {error}")
        return
    say(config, "peak memory, GiB: " + ", ".join(f"{k.partition('memory_')[2]} {v:.2f}" for k, v in memory.items()))


def _disconnect(preemption: Preemption, force: Callable[..., None]) -> None:
    """Leave Ray, or end the local cluster, whether it answers or not."""
    import ray

    from grpo_dist.runtime.ray_watch import kill_ray

    preemption.ignore()
    last = ["the Ray cluster", sys.exception()]
    limits = [threading.Timer(DISCONNECT_S, kill_ray), threading.Timer(2 * DISCONNECT_S, force, last)]
    for each in limits:
        each.daemon = True
        each.start()
    try:
        ray.shutdown()
    finally:
        for each in limits:
            each.cancel()
