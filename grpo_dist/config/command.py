"""What distinguishes the commands that train (`plan/commands.py` has a row for each), the keys of their YAML files with
defaults and comments, what options of groups set, and the text of --help.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from grpo_dist.config.keys import Problem, free_form_keys, leaf_keys
from grpo_dist.config.schema_health import RULES, rule_defaults
from grpo_dist.config.schema_job import JobConfig

Config = TypeVar("Config", bound=JobConfig)

CONFIG_DIR = Path(__file__).parent
_HEALTH = "trainer.health."


@dataclass(frozen=True)
class Command(Generic[Config]):
    """A command's config, its rows and its trainer.

    Attributes:
        name: the command, as `grpo-dist NAME`.
        examples: (what it does, overrides) for --help.
        file: its YAML file; folders beside it are its groups.
        shared: a YAML file with keys that other commands have too; None: there is none.
        notes: each yields what the user of a valid config may not expect.
        load: `module:function` that loads the rows: (config, folder of the trained model, what the reward function
            reads of a row) -> what the run trains on, with `counts` of its rows in a line and `identity`, the number of
            training steps, and notes. Without a folder it only checks the rows, and returns None.
        trainer: `module:Class` of its trainer, a `trainer.loop.TrainingLoop`.
        chosen: key -> (group, option): the option that is used where the key is set and the group is not.
        needed: example of a value, by key that has no default.
        takes_verls_keys: whether the keys of verl's GRPO scripts are known (foreign_keys.yaml).
        lora_section: the section with LoRA's keys; "": there are none.
    """

    name: str
    purpose: str
    examples: Sequence[tuple[str, str]]
    file: Path
    schema: type[Config]
    rules: Sequence[Callable[[Config], Iterator[Problem]]]
    notes: Sequence[Callable[[Config], Iterator[Problem]]]
    load: str
    trainer: str
    chosen: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    needed: Mapping[str, str] = field(default_factory=dict)
    takes_verls_keys: bool = False
    shared: Path | None = None
    lora_section: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files with all keys, their defaults and meanings."""
        return (self.file,) if self.shared is None else (self.file, self.shared)

    def problems(self, config: Config) -> list[Problem]:
        """Everything that is wrong between keys, or with files they name."""
        return [problem for rule in self.rules for problem in rule(config)]

    def group_options(self) -> dict[str, list[str]]:
        """The config groups and their options, sorted."""
        folder = self.file.parent
        return {
            group: sorted(path.stem for path in (folder / group).glob("*.yaml"))
            for group in sorted(default_options(self.file))
        }


@cache
def default_options(file: Path) -> Mapping[str, str]:
    """The config groups of a command's YAML file, each with the option that is used where none is chosen."""
    entries = yaml.safe_load(file.read_text(encoding="utf-8"))["defaults"]
    return {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}


# Any command, where only the names of keys matter.
AnyCommand = Command[Any]


# --- keys and help -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Key:
    """A key of a YAML file, its default, and the comment above it."""

    name: str
    default: object
    comment: str


@cache
def documented_keys(file: Path, schema: type[JobConfig]) -> tuple[Key, ...]:
    """The keys of a YAML file in its order."""
    text = file.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    keys: list[Key] = []
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
            continue
        match = re.match(r"( *)(\w+):", line)
        if match and match[2] != "defaults":
            path = [*path[: len(match[1]) // 2], match[2]]
            key = ".".join(path)
            value = reduce(getitem, path, values)
            if not isinstance(value, dict) or key in free_form_keys(schema):
                keys.append(Key(key, value, " ".join(comment)))
        comment = []
    return tuple(keys)


def all_keys(command: AnyCommand) -> dict[str, Key]:
    """All keys of a command by name, with those of the health rules where it has them."""
    schema: type[JobConfig] = command.schema
    keys = [key for file in reversed(command.files) for key in documented_keys(file, schema)]
    for name in leaf_keys(schema):
        rule, _, setting = name.removeprefix(_HEALTH).partition(".")
        if rule in RULES:
            keys.append(Key(name, rule_defaults(rule)[setting], f"Of the health rule {rule} (docs/metrics.md)."))
    return {key.name: key for key in keys}  # the command's own file comes last and wins


def set_by_groups(command: AnyCommand) -> dict[tuple[str, str], tuple[Key, ...]]:
    """Return what each option of each group sets: keys with their values there, by (group, option)."""
    schema: type[JobConfig] = command.schema
    return {
        (group, option): documented_keys(command.file.parent / group / f"{option}.yaml", schema)
        for group, options in command.group_options().items()
        for option in options
    }


def usage(command: AnyCommand) -> str:
    """Return the text of --help: the command, its groups, examples, and where the keys are explained."""
    called = f"grpo-dist {command.name}"
    lines = [f"usage: {called} [GROUP=OPTION ...] [KEY=VALUE ...] [--quiet] [--full]", ""]
    lines += [f"{command.purpose} Groups change the defaults, and keys change both.", ""]
    lines.append("groups (the default is marked *):")
    lines += [line for group in command.group_options() for line in group_lines(command, group)]
    lines += ["", "examples:"]
    for what, overrides in command.examples:
        lines += [f"  # {what}", f"  {called} {overrides}".rstrip()]
    lines += ["", f"every key, with its meaning and default: {' and '.join(map(str, command.files))}"]
    lines.append("--quiet shows nothing but errors: trainer.console=false; --full shows the whole config in a dry run")
    lines.append("lists are written [a,b], an empty value null, text with = , : [ ] { } as \"key='...'\"")
    return "\n".join(lines)


def group_lines(command: AnyCommand, group: str) -> list[str]:
    """List the options of a group with their descriptions; * marks the one that is used where none is chosen."""
    default = default_options(command.file)[group]
    return [
        f" {'*' if default == option else ' '} {f'{group}={option}':<22} {first_comment(command, group, option)}"
        for option in command.group_options()[group]
    ]


def first_comment(command: AnyCommand, group: str, option: str) -> str:
    """Read the description of a group's option: the first comment of its file."""
    lines = (command.file.parent / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("#").strip() for line in lines if line.startswith("# ") and "@package" not in line)
