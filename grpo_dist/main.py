"""The commands that train: the config is checked, the plan is shown, the job is run, and errors are reported.

    python -m grpo_dist.main algorithm.adv_estimator=grpo [key=value ...]        also grpo-dist train
    grpo-dist sft, grpo-dist reward-model                                        one model on rows with known answers

`plan/commands.py` has a row for each of them. Exit codes: 0 success; 1 the run failed; 2 an error in the config, a file
or a model; 3 Ray itself was lost; 130 and 143 interrupted.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpo_dist.config.command import AnyCommand, usage
from grpo_dist.config.load import load_command
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.errors import GrpoDistError, Interrupted, RayLost, WorkerError, require_current_folder
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT
from grpo_dist.plan.text import changed_keys, format_plan, format_summary
from grpo_dist.redact import redact_text, without_environment
from grpo_dist.terminal import as_typed, quiet_libraries, show

QUIET, FULL = "--quiet", "--full"
"""Short for `trainer.console=false`; and a dry run that shows the whole config."""


def run_command(command: AnyCommand, arguments: Sequence[Any] | None = None, again: Sequence[str] = ()) -> int:
    """Run a command with these overrides, or those of the command line; `again`: what was typed, if others were."""
    overrides: Sequence[Any] = sys.argv[1:] if arguments is None else arguments
    quiet_libraries()
    if "-h" in overrides or "--help" in overrides:
        show(usage(command) + "\n")
        return 0
    if QUIET in overrides:
        overrides = [*(key for key in overrides if key != QUIET), "trainer.console=false"]
    full, overrides = FULL in overrides, [key for key in overrides if key != FULL]
    try:
        require_current_folder()
        config, notes = load_command(overrides, command)
        if config.trainer.dry_run:
            dry_run(config, notes, None if full else changed_keys(config, command))
            return 0
        if isinstance(config, RunConfig) and config.trainer.rehearse:
            from grpo_dist.cli.rehearse import rehearse

            return rehearse(config)
        if config.trainer.console:
            show(format_summary(config, notes) + "\n")
        from grpo_dist.run.run import run  # its imports are slow, so only after the config was checked

        def on_forced_end(error: RayLost | Interrupted) -> None:
            _report(error)
            if isinstance(error, RayLost) or error.checkpoint is not None:
                _tell_how_to_go_on(again or [command.name, *overrides], error.checkpoint, config)

        run(config, on_forced_end=on_forced_end)
        push_at_end(config)
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


main, sft, reward_model = (partial(run_command, command) for command in (GRPO, SFT, REWARD_MODEL))


def fork(arguments: Sequence[str]) -> int:
    """Go on from a checkpoint of another run (cli/fork.py); returns the exit code."""
    from grpo_dist.cli.fork import fork_overrides

    return run_command(GRPO, fork_overrides(arguments), ["fork", *arguments])


def push_at_end(config: JobConfig) -> None:
    """Push the model that a run has exported, where it is to; a failure is told, and is none of the run."""
    if (trainer := config.trainer).push_to_hub is None or trainer.val_only:
        return
    from grpo_dist.cli.trained import push

    try:
        push(config, trainer.push_to_hub, private=trainer.hub_private_repo)
    except GrpoDistError as error:
        run = shlex.quote(str(Path(trainer.default_local_dir).absolute()))
        later = f"grpo-dist export {run} --push {trainer.push_to_hub}{'' if trainer.hub_private_repo else ' --public'}"
        show(f"warning: {error}\nthe model stays where it is; to push it: {later}\n", sys.stderr)


def dry_run(config: JobConfig, notes: list[str], changed: Sequence[str] | None) -> None:
    """Print the plan of a run and, but for `trainer.dry_run=config`, check on this machine all that the run needs.

    `changed` are the keys of the config to show, as key=value; None: all of it.
    """
    show(format_plan(config, notes, changed) + "\n")
    if config.trainer.dry_run != "config":
        from grpo_dist.run.run import check_this_machine

        show("\nchecked on this machine\n")
        check_this_machine(config, lambda line: show(f"  {line}\n"))
    if isinstance(config, RunConfig):
        show("\nnext: trainer.rehearse=true in the place of trainer.dry_run runs all of it here, with a small model\n")


def _tell_how_to_go_on(arguments: Sequence[str], checkpoint: Path | None, config: JobConfig) -> None:
    """Print the command line that resumes from a checkpoint: the same one, without where that run was to start from."""
    start = ("trainer.resume_mode=disable", "trainer.resume_mode=resume_path", "trainer.resume_from_path=")
    run_dir = Path(config.trainer.default_local_dir).absolute()
    of_this_run = checkpoint is not None and checkpoint.parent.absolute() == run_dir
    kept = [key for key in arguments if not (of_this_run and key.startswith(start))]
    text = redact_text(f"{as_typed('grpo-dist')} {shlex.join(kept)}")
    where = "none yet, so the run begins anew" if checkpoint is None else checkpoint
    show(f"checkpoint: {where}\nto go on: {text}\n", sys.stderr)


def _report(error: GrpoDistError | Interrupted) -> None:
    kind = "" if isinstance(error, Interrupted) else "error: "
    text = "\n".join([f"{kind}{error}", *(f"  {note}" for note in getattr(error, "__notes__", []))])
    show(f"\n{redact_text(text)}\n", sys.stderr)
    if isinstance(error, WorkerError) and error.remote_traceback:
        show(f"\n{without_environment(error.remote_traceback.strip())}\n", sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
