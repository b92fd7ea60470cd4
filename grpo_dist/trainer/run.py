"""A run from a checked config to its summary: cluster, workers, trainer, and the end of every process."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from grpo_dist.config.load import dump_config
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import ConfigError, Terminated
from grpo_dist.tracking.base import Trackers, build_trackers
from grpo_dist.tracking.console import Progress
from grpo_dist.tracking.summary import format_summary
from grpo_dist.trainer.preflight import check_model
from grpo_dist.workers.cluster import connect

RESOLVED_CONFIG = "config.yaml"


def run(config: RunConfig) -> None:
    """Train as the config says, until done or interrupted.

    Raises:
        GrpoDistError: the run failed; see errors.py.
        Terminated: SIGTERM. (Ray's calls turn whatever a signal handler raises into a KeyboardInterrupt.)
    """
    terminated = False

    def terminate(signum: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        raise Terminated

    try:
        _run(config, terminate)
    except KeyboardInterrupt:
        if terminated:
            raise Terminated from None
        raise


def _run(config: RunConfig, terminate: Callable[[int, FrameType | None], None]) -> None:
    """Train. On the way out, whatever happened, every process that was started is ended."""
    started = time.monotonic()
    check_model(config)  # a mistake in it is told before anything starts
    run_dir = _make_run_dir(config)
    signal.signal(signal.SIGTERM, terminate)
    with ExitStack() as stack:
        stack.callback(_disconnect)
        message = connect(config.ray_kwargs.ray_init.address, config.ray_kwargs.ray_init.num_cpus)
        signal.signal(signal.SIGTERM, terminate)  # again: Ray has put one in its place that aborts the process
        _say(config, message)
        trainer, workers, trackers = _build(config, run_dir, stack)
        _say(config, f"workers ready after {time.monotonic() - started:.1f} s")
        trainer.fit()
        memory = workers.peak_memory()
        _say(
            config, "peak memory, GiB: " + ", ".join(f"{k.partition('memory_')[2]} {v:.2f}" for k, v in memory.items())
        )
        trackers.close()
        trainer.progress.close()
    if "console" in config.trainer.logger:
        hf_model = run_dir / "huggingface" if config.trainer.export_hf_model else None
        seconds = time.monotonic() - started
        sys.stdout.write(format_summary(trainer.history, run_dir=run_dir, seconds=seconds, hf_model=hf_model) + "\n")


def _build(config: RunConfig, run_dir: Path, stack: ExitStack) -> tuple:
    """Started workers, a trainer that has resumed if it should, and its trackers."""
    from grpo_dist.trainer.build import Workers, build_trainer, load_run_prompts, resolve_names, total_steps

    resolve_names(config)
    workers = Workers(config)
    stack.callback(workers.shutdown)
    prompts, notes = load_run_prompts(config)
    for note in notes:
        _say(config, note)
    steps = total_steps(config, prompts)
    trainer = build_trainer(config, workers.start(steps), prompts, steps)
    folder = trainer.resume()
    if folder is not None:
        _say(config, f"resumed from {folder}")
        if trainer.step >= steps:
            _say(
                config,
                f"nothing to train: it is at step {trainer.step} of {steps}. For more, raise "
                "trainer.total_training_steps; for a new run, set trainer.experiment_name or resume_mode=disable",
            )
    stream = sys.stderr if "console" in config.trainer.logger else None
    trainer.progress = stack.enter_context(Progress(steps, trainer.step, stream))
    trainer.trackers = stack.enter_context(_trackers(config, run_dir, trainer.step if folder else None))
    for note in trainer.trackers.notes:
        trainer.progress.message(note)
    return trainer, workers, trainer.trackers


def _trackers(config: RunConfig, run_dir: Path, resumed_step: int | None) -> Trackers:
    return build_trackers(
        config.trainer.logger,
        run_dir=run_dir,
        project_name=config.trainer.project_name,
        experiment_name=config.trainer.experiment_name,
        config=config.model_dump(mode="json"),
        resumed_step=resumed_step,
    )


def _make_run_dir(config: RunConfig) -> Path:
    run_dir = Path(config.trainer.default_local_dir).absolute()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        temporary = run_dir / f"{RESOLVED_CONFIG}.tmp"
        temporary.write_text(dump_config(config))
        temporary.replace(run_dir / RESOLVED_CONFIG)
    except OSError as error:
        raise ConfigError(f"trainer.default_local_dir={run_dir}: cannot be written: {error}") from error
    return run_dir


def _say(config: RunConfig, text: str) -> None:
    if "console" in config.trainer.logger:
        sys.stderr.write(text + "\n")


def _disconnect() -> None:
    import ray

    for number in (signal.SIGINT, signal.SIGTERM):  # a second one must not cut the clean-up short
        signal.signal(number, signal.SIG_IGN)
    ray.shutdown()
