"""The process of a rehearsal's run: `python -m grpo_dist.run.rehearsed FILE STEP`, with its config as JSON to read.

It trains as any run does, with rollout workers that know the rows' own answers, is killed behind STEP, while that
checkpoint may still be on its way, and writes into FILE how it failed.
"""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import GrpoDistError
from grpo_dist.plan.roles import ROLES
from grpo_dist.run.run import run
from grpo_dist.terminal import quiet_libraries


def killed(step: int, _: object) -> None:
    """End this driver as a machine that goes down would."""
    if step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Train; returns the exit code."""
    quiet_libraries()
    config = RunConfig.model_validate_json(sys.stdin.read())
    ROLES["rollout"] = replace(ROLES["rollout"], worker="grpo_dist.workers.rehearsal:RehearsedRollout")
    try:
        run(config, killed)
    except GrpoDistError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        Path(sys.argv[1]).write_text(json.dumps([text, error.exit_code]))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
