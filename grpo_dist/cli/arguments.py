"""The arguments that several commands take: how each is called, which model it uses, and how it samples."""

from __future__ import annotations

import argparse
from typing import Any

from grpo_dist.config.run_code import FLAG

_USUAL = "default: as the run validates"
_MODEL = "folder of a run, a checkpoint in it, a Hugging Face folder, a hub name or builtin:NAME"
_TRUST = "run code that the run's config names (the model's own, reward functions), and take its engine arguments"
_SHARED: dict[str, dict[str, Any]] = {
    "model": {"metavar": "RUN_OR_MODEL", "help": _MODEL},
    "overrides": {
        "nargs": "*",
        "metavar": "key=value",
        "help": "keys of the run's config to change (grpo-dist help KEY)",
    },
    "--step": {"type": int, "help": "of the run's checkpoint; default: the last one"},
    FLAG: {"dest": "trust", "action": "store_true", "help": _TRUST},
    "--n": {"type": int, "help": f"answers to each prompt; {_USUAL}"},
    "--temperature": {"type": float, "help": f"0: the likeliest token each time; {_USUAL}"},
    "--top-p": {"type": float, "help": _USUAL},
    "--top-k": {"type": int, "help": _USUAL},
    "--max-tokens": {"type": int, "help": f"of a response; {_USUAL}"},
    "--seed": {"type": int, "help": "of what is sampled: the same answers each time"},
    "--max-model-len": {"type": int, "help": "longest prompt and response, in tokens"},
}
# What `trained.find_trained` takes.
MODEL_ARGUMENTS = ("model", "overrides", "--step", FLAG)
# What `asking.sampling_of` and `asking.asking` read, besides --n.
SAMPLING_ARGUMENTS = ("--temperature", "--top-p", "--top-k", "--max-tokens", "--seed", "--max-model-len")


def command_parser(name: str, description: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser that calls the command `grpo-dist NAME`; `options` are argparse's."""
    return argparse.ArgumentParser(prog=f"grpo-dist {name}", description=description, **options)


def add_shared(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add arguments of these names."""
    for name in names:
        parser.add_argument(name, **_SHARED[name])
