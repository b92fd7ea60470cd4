"""What the commands have in common: the config is checked, the plan is shown, the job is run, and errors are reported.

Exit codes: 0 success; 1 the run failed; 2 an error in the config, a file or a model; 3 Ray itself was lost; 130 and 143
interrupted.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_dist.config.command import Command, Config
from grpo_dist.config.load import load_command
from grpo_dist.config.usage import usage
from grpo_dist.errors import GrpoDistError, Interrupted, RayLost, WorkerError
from grpo_dist.redact import redact_text, without_environment
from grpo_dist.registry import load_attribute
from grpo_dist.terminal import show

if TYPE_CHECKING:
    from grpo_dist.trainer.run import Job

QUIET = "--quiet"
"""Short for `trainer.console=false`."""


def run_command(
    command: Command[Config],
    arguments: list[str] | None,
    job: str,
    *,
    plan: Callable[[Config, list[str]], str],
    summary: Callable[[Config, list[str]], str],
) -> int:
    """Run a command.

    Args:
        command: the config that it takes.
        arguments: the overrides; None: those of the command line.
        job: its `trainer.run.Job`, as `pkg.module:name`, which is imported once the config is checked.
        plan: the text of a dry run, from the config and the notes on it.
        summary: a short form of it.

    Returns:
        The exit code.
    """
    overrides = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(overrides):
        show(usage(command) + "\n")
        return 0
    if QUIET in overrides:
        overrides = [*(each for each in overrides if each != QUIET), "trainer.console=false"]
    try:
        config, notes = load_command(overrides, command)
        if config.trainer.dry_run:
            dry_run(config, notes, job, plan)
            return 0
        if config.trainer.console:
            show(summary(config, notes) + "\n")
        from grpo_dist.trainer.run import run  # its imports are slow, so only after the config was checked

        def on_forced_end(error: RayLost | Interrupted) -> None:
            _report(error)
            if isinstance(error, RayLost) or error.checkpoint is not None:
                _tell_how_to_go_on(command, overrides, error.checkpoint, config)

        run(config, load_attribute(job, key="job"), on_forced_end=on_forced_end)
    except Interrupted as interrupt:
        on_forced_end(interrupt)
        return interrupt.exit_code
    except GrpoDistError as error:
        _report(error)
        return error.exit_code
    except KeyboardInterrupt:  # before the run listens to signals
        _report(Interrupted())
        return Interrupted.exit_code
    return 0


def dry_run(config: Config, notes: list[str], job: str, plan: Callable[[Config, list[str]], str]) -> None:
    """Print the plan of a run and, but for `trainer.dry_run=config`, check on this machine all that the run needs.

    Args:
        config: of the run.
        notes: on the config.
        job: as for `run_command`.
        plan: the same.

    Raises:
        ConfigError: everything that is wrong.
        DataError: a model cannot be built of its files.
    """
    show(plan(config, notes) + "\n")
    if config.trainer.dry_run != "config":
        _rehearse(config, load_attribute(job, key="job"))


def _tell_how_to_go_on(command: Command[Config], overrides: list[str], checkpoint: Path | None, config: Config) -> None:
    """Print the command line that resumes from a checkpoint: the same one, without where that run was to start from."""
    start = ("trainer.resume_mode=disable", "trainer.resume_mode=resume_path", "trainer.resume_from_path=")
    run_dir = Path(config.trainer.default_local_dir).absolute()
    of_this_run = checkpoint is not None and checkpoint.parent.absolute() == run_dir
    kept = [each for each in overrides if not (of_this_run and each.startswith(start))]
    text = redact_text(shlex.join([sys.executable, "-m", command.module, *kept]))
    where = "none yet, so the run begins anew" if checkpoint is None else checkpoint
    show(f"checkpoint: {where}\nto go on: {text}\n", sys.stderr)


def _rehearse(config: Config, job: Job[Config]) -> None:
    """Run all checks that a run makes before it starts Ray, and those that its ranks make before they read weights."""

    def tell(line: str) -> None:
        show(f"  {line}\n")

    show("\nchecked on this machine\n")
    job.preflight(config, tell, rehearsal=True)
    from grpo_dist.trainer.checks import is_on_the_hub
    from grpo_dist.trainer.rehearsal import build_models  # it imports the models' code, so only after the checks

    here = [model for model in job.models(config) if not is_on_the_hub(model.path)]  # a run downloads the weights
    build_models(here, config.device, tell)


def _report(error: GrpoDistError | Interrupted) -> None:
    """Print what ended the run and where, with the traceback of a worker's exception."""
    kind = "" if isinstance(error, Interrupted) else "error: "
    text = "\n".join([f"{kind}{error}", *(f"  {note}" for note in getattr(error, "__notes__", []))])
    show(f"\n{redact_text(text)}\n", sys.stderr)
    if isinstance(error, WorkerError) and error.remote_traceback:
        show(f"\n{without_environment(error.remote_traceback.strip())}\n", sys.stderr)
