"""Runs a checked config: connects to Ray, starts workers, trains, prints the summary, and ends every process."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_dist.config.halved import halved
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import OutOfMemory, Terminated, WorkerError, WorkerLost
from grpo_dist.tracking.base import Trackers, build_trackers, restore_tracker_ids
from grpo_dist.tracking.console import Progress
from grpo_dist.tracking.jsonl import FILE_NAME as METRICS
from grpo_dist.tracking.jsonl import read_metrics
from grpo_dist.tracking.summary import format_summary
from grpo_dist.trainer.checkpoint.config_changes import saved_config
from grpo_dist.trainer.checkpoint.folder import last_checkpoint
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.preflight import Ready, preflight
from grpo_dist.trainer.run_lock import run_lock, writing_into
from grpo_dist.trainer.run_prompts import new_sampler
from grpo_dist.workers.cluster import connect

if TYPE_CHECKING:
    from grpo_dist.trainer.build import Workers
    from grpo_dist.trainer.checkpoint.resume import Resumed
    from grpo_dist.trainer.trainer import GRPOTrainer

RESOLVED_CONFIG = "config.yaml"


def run(config: RunConfig) -> None:
    """Train as the config says, until done or interrupted.

    Raises:
        GrpoDistError: the run failed; see errors.py.
        Terminated: SIGTERM. (Ray's calls turn whatever a signal handler raises into a KeyboardInterrupt.)
    """
    preemption = Preemption()
    try:
        _run(config, preemption)
    except KeyboardInterrupt:
        if preemption.asked:
            raise Terminated from None
        raise


def _run(config: RunConfig, preemption: Preemption) -> None:
    """Check what can be checked without Ray, then train. Every process is ended, also after an error."""
    started = time.monotonic()
    ready = preflight(config, lambda line: None, rehearsal=False)
    run_dir = _make_run_dir(config)
    signal.signal(signal.SIGTERM, preemption.handle)
    with ExitStack() as stack:
        stack.enter_context(run_lock(run_dir))
        _write_config(config, run_dir)
        stack.callback(_disconnect)
        message = connect(config.ray_kwargs.ray_init.address, config.ray_kwargs.ray_init.num_cpus)
        signal.signal(signal.SIGTERM, preemption.handle)  # again: Ray's own, put in its place, aborts the process
        _say(config, message)
        for note in ready.notes:
            _say(config, note)
        first_step = _train(config, run_dir, preemption, ready)
    if "console" in config.trainer.logger:
        hf_model = run_dir / "huggingface" if config.trainer.export_hf_model and not config.trainer.val_only else None
        seconds = time.monotonic() - started
        rows = [row for row in read_metrics(run_dir / METRICS) if row["step"] >= first_step]
        sys.stdout.write(format_summary(rows, run_dir=run_dir, seconds=seconds, hf_model=hf_model) + "\n")


def _train(config: RunConfig, run_dir: Path, preemption: Preemption, ready: Ready) -> int:
    """Start workers and train. If a lost worker held the policy, start all of them again from the last checkpoint.

    With `trainer.halve_on_out_of_memory` that is also done if a GPU runs out of memory, with the responsible setting
    halved.

    Returns:
        The first step that this run has recorded.

    Raises:
        WorkerLost: all workers have been started again `trainer.max_actor_restarts` times.
        OutOfMemory: likewise; or halving is off, or the setting cannot be halved.
    """
    restarts, present, last, first_step = 0, config, None, 0
    lost: WorkerError
    while True:
        trainer = None
        with ExitStack() as stack:
            try:
                trainer, workers = _build(present, run_dir, stack, preemption, ready)
                if restarts == 0 and trainer.step > 0 and not config.trainer.val_only:
                    first_step = trainer.step + 1
                trainer.fit()
                _tell_memory(config, workers)
                trainer.trackers.close()
                trainer.progress.close()
                return first_step
            except OutOfMemory as error:
                smaller = halved(present, error.setting) if config.trainer.halve_on_out_of_memory else None
                if smaller is None or restarts == config.trainer.max_actor_restarts:
                    raise
                present, lost = smaller, error
                _say(config, f"trainer.halve_on_out_of_memory=true: half of {'='.join(map(str, error.setting or ()))}")
            except WorkerLost as error:
                # a worker that is lost at the first start would most likely be lost again, if the model is too large
                goes_on = restarts > 0 if trainer is None else trainer.roles.holds_state(error.role)
                if preemption.asked:
                    _say(config, f"SIGTERM: no checkpoint could be written: {error}")
                    preemption.release()
                if not goes_on or restarts == config.trainer.max_actor_restarts:
                    raise
                lost = error
                preemption.held = False  # the new workers are those of a finished step
        restarts += 1
        last = last if trainer is None else trainer.saver.last
        present = _from_last_checkpoint(present, last)
        where = last or "the beginning: there is no checkpoint yet"
        count = f"{restarts} of trainer.max_actor_restarts={config.trainer.max_actor_restarts}"
        _say(config, f"{lost}\nstarting all workers again from {where} ({count})")


def _from_last_checkpoint(config: RunConfig, folder: Path | None) -> RunConfig:
    """The config with which a run resumes from the checkpoint `folder`, or starts anew if that is None.

    If that checkpoint has been damaged since, the run resumes from the one before it, as at any start.
    """
    run_dir = Path(config.trainer.default_local_dir).absolute()
    if folder is None:
        where = {"resume_mode": "disable", "resume_from_path": None}
    elif folder.absolute() == last_checkpoint(run_dir):
        where = {"resume_mode": "auto", "resume_from_path": None}
    else:
        where = {"resume_mode": "resume_path", "resume_from_path": str(folder)}
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=where)})


def _tell_memory(config: RunConfig, workers: Workers) -> None:
    try:
        memory = workers.peak_memory()
    except WorkerError as error:  # the run is done: it does not need them any more
        _say(config, f"peak memory is not known: {error}")
        return
    _say(config, "peak memory, GiB: " + ", ".join(f"{k.partition('memory_')[2]} {v:.2f}" for k, v in memory.items()))


def _build(
    config: RunConfig, run_dir: Path, stack: ExitStack, preemption: Preemption, ready: Ready
) -> tuple[GRPOTrainer, Workers]:
    """Start the workers, resume from a checkpoint if there is one, and make the trainer."""
    from grpo_dist.trainer.build import Workers, build_trainer, restore_roles
    from grpo_dist.trainer.checkpoint.resume import find_resumed

    started, steps = time.monotonic(), ready.steps
    workers = Workers(config)
    stack.callback(workers.shutdown)
    _say(config, "starting workers: " + ", ".join(f"{len(group)} {group.role}" for group in workers.groups.values()))
    resumed = find_resumed(config, ready.prompts.identity)
    roles = workers.start(steps)
    restored = restore_roles(config, roles, resumed)  # before trackers drop the rows after the checkpoint
    stream = sys.stderr if "console" in config.trainer.logger else None
    progress = stack.enter_context(Progress(steps, resumed.state.step if resumed is not None else 0, stream))
    trackers = stack.enter_context(_trackers(config, run_dir, resumed))
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
    for note in [*_notes(config, resumed, steps), *trackers.notes]:
        progress.message(note)
    _say(config, f"workers ready after {time.monotonic() - started:.1f} s")
    return trainer, workers


def _notes(config: RunConfig, resumed: Resumed | None, steps: int) -> list[str]:
    """Messages about the checkpoint from which the run resumes."""
    if resumed is None:
        return []
    notes = [f"resumed from {resumed.folder}"]
    if resumed.changes:
        notes.append("\n  ".join(["the config has changed since then:", *resumed.changes]))
    if resumed.state.step >= steps and not config.trainer.val_only:
        notes.append(
            f"nothing to train: it is at step {resumed.state.step} of {steps}. For more, raise "
            "trainer.total_training_steps; for a new run, set trainer.experiment_name or resume_mode=disable"
        )
    return notes


def _trackers(config: RunConfig, run_dir: Path, resumed: Resumed | None) -> Trackers:
    """The trackers of this run, or those of the run that it resumes."""
    resumed_step = None
    if resumed is not None:
        restore_tracker_ids(Path(config.trainer.default_local_dir), resumed.state.trackers)
        resumed_step = None if config.trainer.val_only else resumed.state.step
    return build_trackers(
        config.trainer.logger,
        run_dir=run_dir,
        project_name=config.trainer.project_name,
        experiment_name=config.trainer.experiment_name,
        config=config.model_dump(mode="json"),
        resumed_step=resumed_step,
    )


def _make_run_dir(config: RunConfig) -> Path:
    run_dir = config.trainer.record_dir.absolute()
    with writing_into(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def _write_config(config: RunConfig, run_dir: Path) -> None:
    temporary = run_dir / f"{RESOLVED_CONFIG}.tmp"
    with writing_into(run_dir):
        temporary.write_text(saved_config(config))
        temporary.replace(run_dir / RESOLVED_CONFIG)


def _say(config: RunConfig, text: str) -> None:
    if "console" in config.trainer.logger:
        sys.stderr.write(text + "\n")


def _disconnect() -> None:
    import ray

    for number in (signal.SIGINT, signal.SIGTERM):  # a second one must not cut the clean-up short
        signal.signal(number, signal.SIG_IGN)
    ray.shutdown()
