"""What several commands take: which model is used, how it samples, and the file that `--output` names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grpo_dist.assets import expanded
from grpo_dist.config.run_code import FLAG
from grpo_dist.errors import ConfigError

_USUAL = "default: as the run validates"
_MODEL = "folder of a run, a checkpoint in it, a Hugging Face folder, a hub name or builtin:NAME"
_KEYS = "keys of the run's config to change (grpo-dist help KEY)"
_TRUST = "run code that the run's config names (the model's own, reward functions), and take its engine arguments"
_SHARED: dict[str, dict[str, Any]] = {
    "model": {"metavar": "RUN_OR_MODEL", "help": _MODEL},
    "overrides": {"nargs": "*", "metavar": "key=value", "help": _KEYS},
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


def check_output(output: str | None, *, replaces: bool = False) -> None:
    """Check before the work that the file of --output, if it is given, can be written after it."""
    if output is None:
        return
    path = expanded(output)
    if not path.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {path.parent}; make it, or name another file")
    if path.exists() and not (replaces and path.is_file()):
        raise ConfigError(f"--output {output} exists; remove it, or name another file")


def write_output(path: Path, text: str) -> None:
    """Write the file of --output so that it has the whole text, or is as it was."""
    partial = path.with_name(f"{path.name}.tmp")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"--output {path}: {error}") from None
