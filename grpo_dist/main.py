"""The command line: checks the config and trains.

    python -m grpo_dist.main algorithm.adv_estimator=grpo [key=value ...]

Exit codes: 0 success; 1 the run failed; 2 an error in the config, a file or a model; 130 and 143 interrupted.
"""

from __future__ import annotations

import signal
import sys

from grpo_dist.config.grpo import GRPO
from grpo_dist.config.load import load_config
from grpo_dist.config.plan import format_plan, format_summary
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.usage import usage
from grpo_dist.errors import GrpoDistError, Terminated, WorkerError


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: the overrides; None: those of the command line.

    Returns:
        The exit code.
    """
    overrides = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(overrides):
        sys.stdout.write(usage(GRPO) + "\n")
        return 0
    try:
        config, notes = load_config(overrides)
        if config.trainer.dry_run:
            sys.stdout.write(format_plan(config, notes) + "\n")
            if config.trainer.dry_run != "config":
                _rehearse(config)
            return 0
        sys.stdout.write(format_summary(config, notes) + "\n")
        sys.stdout.flush()
        from grpo_dist.trainer.run import run  # imports torch and Ray, so only after the config was checked

        run(config)
    except GrpoDistError as error:
        _report(error)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        number = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
        sys.stderr.write(f"\nstopped by {number.name}\n")
        return 128 + number
    return 0


def _rehearse(config: RunConfig) -> None:
    """Run all checks that a run makes before it starts Ray."""
    from grpo_dist.trainer.preflight import preflight

    def tell(line: str) -> None:
        sys.stdout.write(f"  {line}\n")
        sys.stdout.flush()

    sys.stdout.write("\nchecked on this machine\n")
    preflight(config, tell, rehearsal=True)


def _report(error: GrpoDistError) -> None:
    """Print what failed and where, with the traceback of a worker's exception."""
    lines = [f"error: {error}", *(f"  {note}" for note in getattr(error, "__notes__", []))]
    if isinstance(error, WorkerError) and error.remote_traceback:
        lines += ["", error.remote_traceback.strip()]
    sys.stderr.write("\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
