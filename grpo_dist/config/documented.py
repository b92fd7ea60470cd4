"""The keys of the YAML files with their defaults and comments, what options of groups set, and the text of --help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from grpo_dist.config.command import AnyCommand, default_options
from grpo_dist.config.keys import free_form_keys, leaf_keys
from grpo_dist.config.schema_health import RULES, rule_defaults
from grpo_dist.config.schema_job import JobConfig

_HEALTH = "trainer.health."


@dataclass(frozen=True)
class Key:
    """A key of a YAML file, its default, and the comment above it."""

    name: str
    default: object
    comment: str


@cache
def documented_keys(file: Path, schema: type[JobConfig]) -> tuple[Key, ...]:
    """The keys of a YAML file in its order."""
    return tuple(_documented(file, schema))


def _documented(file: Path, schema: type[JobConfig]) -> Iterator[Key]:
    text = file.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
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
            value = _value(values, path)
            if not isinstance(value, dict) or key in free_form_keys(schema):
                yield Key(key, value, " ".join(comment))
        comment = []


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


def _value(values: dict, path: list[str]) -> object:
    found: object = values
    for name in path:
        assert isinstance(found, dict)
        found = found[name]
    return found


def usage(command: AnyCommand) -> str:
    """Return the text of --help: the command, its groups, examples, and where the keys are explained."""
    called = f"grpo-dist {command.name}"
    lines = [f"usage: {called} [GROUP=OPTION ...] [KEY=VALUE ...] [--quiet]", ""]
    lines += [f"{command.purpose} Groups change the defaults, and keys change both.", ""]
    lines.append("groups (the default is marked *):")
    lines += [line for group in command.group_options() for line in group_lines(command, group)]
    lines += ["", "examples:"]
    for what, overrides in command.examples:
        lines += [f"  # {what}", f"  {called} {overrides}".rstrip()]
    lines += ["", f"every key, with its meaning and default: {' and '.join(map(str, command.files))}"]
    lines.append("--quiet shows nothing but errors: trainer.console=false")
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
