"""Runs a config: checks all that can be checked without Ray, finds the cluster, trains there, prints the summary.

Loads neither Ray nor vLLM before that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from grpo_dist.assets import is_on_the_hub
from grpo_dist.checks.all_checks import check_all, check_resume, is_finished
from grpo_dist.checks.models import build_models, checked_models
from grpo_dist.config.run_code import ENGINE, FLAG, REWARD, code_of_run
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.errors import Interrupted, RayLost
from grpo_dist.plan.plan import make_plan
from grpo_dist.runtime.cluster import prepare
from grpo_dist.terminal import show
from grpo_dist.tracking.jsonl import METRICS, read_metrics
from grpo_dist.tracking.metric_names import why_it_ends
from grpo_dist.tracking.summary import format_summary
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.record import EXPORTED, make_run_dir, run_lock, write_config

if TYPE_CHECKING:
    from grpo_dist.trainer.loop import StepCallback


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
        on_step: called with step and metrics after each training step; what is true ends the training there.
        on_forced_end: called before that end, in another thread.

    Raises:
        GrpoDistError: the run failed; see errors.py.
        Interrupted: SIGINT or SIGTERM. (Ray's calls turn whatever a signal handler raises into a KeyboardInterrupt.)
    """
    preemption, started = Preemption(), time.monotonic()
    try:
        ready = check_all(config, lambda line: None, dry_run=False)
        if is_finished(config, ready.steps):
            if config.trainer.console:
                show(check_resume(config, ready.data.identity, ready.steps, verify=False) + "\n")
            return
        if changed := [row for row in checked_models(config) if row.settings.changes_model]:
            build_models(changed, config.device, lambda line: None)  # what is changed may not fit a model
        run_dir = make_run_dir(config)
        with ExitStack() as stack:  # which ends every process, also after an error
            stack.callback(preemption.restore)
            preemption.listen()
            stack.enter_context(run_lock(run_dir))
            write_config(config, run_dir)
            address = prepare(config.ray_kwargs.ray_init.address, bool(getattr(config.trainer, "profile_steps", None)))
            from grpo_dist.run import training  # imports Ray, whose environment is set by now

            first_step = training.train(config, address, run_dir, preemption, ready, on_step, on_forced_end)
        if config.trainer.console:
            hf_model = run_dir / EXPORTED if config.trainer.export_hf_model and not config.trainer.val_only else None
            rows = read_metrics(run_dir / METRICS)
            why = why_it_ends(config.trainer.stop_at, rows[-1]) if rows and not config.trainer.val_only else ""
            shown = format_summary(
                rows,
                run_dir=run_dir,
                first_step=first_step,
                seconds=time.monotonic() - started,
                why=why,
                hf_model=hf_model,
                flags=_flags(config),
                job=make_plan(config) if isinstance(config, RunConfig) else None,
            )
            show(shown + "\n")
    except KeyboardInterrupt:
        if preemption.asked:
            raise preemption.interrupt() from None
        raise


def check_this_machine(config: JobConfig, tell: Callable[[str], None]) -> None:
    """Run all checks that a run makes before it starts Ray, and those that its ranks make before they read weights.

    Raises:
        ConfigError: everything that is wrong.
        DataError: a model cannot be built of its files.
    """
    check_all(config, tell, dry_run=True)
    here = [row for row in checked_models(config) if not is_on_the_hub(row.settings.path)]  # else a run downloads it
    build_models(here, config.device, tell)


def _flags(config: JobConfig) -> dict[str, str]:
    """The commands that use this run's model, with the flag by which they take code that its config names."""
    if not isinstance(config, RunConfig):
        return {}
    takes: dict[str, Any] = {"generate": ENGINE, "serve": ENGINE}
    if config.data.val_files:
        takes["eval"] = (*ENGINE, *REWARD)
    return {command: f" {FLAG}" if code_of_run(config, keys) else "" for command, keys in takes.items()}
