"""`grpo-dist NAME ...`: finds the command and runs it. Loads nothing but the command that is asked for.

What the user can mend a command raises as a ConfigError, or another GrpoDistError, which is shown here.
Exit codes: those of the command; 2 where there is no such command.
"""

from __future__ import annotations

import os
import signal
import sys

import grpo_dist
from grpo_dist.errors import GrpoDistError, did_you_mean, require_current_folder
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.redact import redact_text
from grpo_dist.terminal import quiet_libraries, show

# By command: its main function, which takes the arguments and returns the exit code, and what it is for.
ENTRIES: dict[str, tuple[str, str]] = {
    "train": ("grpo_dist.main:main", "train a policy by GRPO, PPO and their kin (also python -m grpo_dist.main)"),
    "sft": ("grpo_dist.main:sft", "fine-tune a model on conversations"),
    "reward-model": ("grpo_dist.main:reward_model", "train a reward model"),
    "fork": ("grpo_dist.main:fork", "go on from a run's checkpoint with another config, on the same prompts and seeds"),
    "rehearse": ("grpo_dist.cli.rehearse:main", "run the whole of a training here, small, before a GPU is paid for"),
    "check-env": ("grpo_dist.cli.check_env:main", "play a run's episodes by scripts, and say what is wrong with them"),
    "generate": ("grpo_dist.cli.generate:main", "answer prompts with a trained model, or chat with it"),
    "eval": ("grpo_dist.cli.evaluate:main", "compare models on rows, with confidence intervals"),
    "serve": ("grpo_dist.cli.serve:main", "serve a trained model over HTTP, as OpenAI's API"),
    "report": ("grpo_dist.cli.report:main", "curves, alarms and responses of a run, as a page"),
    "audit": ("grpo_dist.cli.audit:main", "which rows of a run have a wrong or unreadable ground truth"),
    "replay": ("grpo_dist.cli.replay:main", "compute a recorded step again, and name what differs"),
    "agreement": ("grpo_dist.cli.agreement:main", "run sampler and trainer on the same tokens, layer by layer"),
    "export": ("grpo_dist.cli.export:main", "write the model of a checkpoint as a Hugging Face folder"),
    "data": ("grpo_dist.tasks.prepare:main", "write GSM8K, MATH, Countdown or plans as files of rows"),
    "doctor": ("grpo_dist.cli.doctor:main", "what this machine has, and what will not work, with the fix"),
    "help": ("grpo_dist.cli.help:main", "explain a command or a key: grpo-dist help lr"),
}
MOVED = {"check-reward": "check-env"}  # names that commands have had


quiet_libraries()  # here, because processes that a command spawns import this module too


def main(arguments: list[str] | None = None) -> int:
    """Run the command that these arguments, or those of the command line, name; returns the exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["help"]
    if name == "--version":
        show(f"grpo_dist {grpo_dist.__version__}\n")
        return 0
    name = "help" if name in ("-h", "--help") else name
    if name in MOVED:
        show(f"grpo-dist {name}: this command has moved; run grpo-dist {' '.join([MOVED[name], *rest])}\n", sys.stderr)
        return 2
    if name not in ENTRIES:
        hint = did_you_mean(name, ENTRIES, "{}")
        if "=" in name:  # an override, as `python -m grpo_dist.main` takes them
            hint = f"; did you mean grpo-dist train {name}?"
        show(f"error: grpo-dist {name}: there is no such command{hint}\n\n{overview()}", sys.stderr)
        return 2
    try:
        require_current_folder()
        return int(load_attribute(ENTRIES[name][0], key="command")(rest))
    except GrpoDistError as error:
        show(f"error: {redact_text(str(error))}\n", sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def overview() -> str:
    """The commands, with what they are for."""
    lines = ["usage: grpo-dist COMMAND ...      (or python -m grpo_dist COMMAND ...)", "", "commands:"]
    lines += [f"  {name:<13} {purpose}" for name, (_, purpose) in ENTRIES.items()]
    lines += ["", "grpo-dist COMMAND --help says more; grpo-dist help KEY explains a key; --version"]
    return "\n".join(lines) + "\n"
