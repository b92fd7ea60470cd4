"""Parses the command line: the groups it selects, the keys it sets, and its mistakes.

Hydra stops at the first mistake with a traceback. Here every override is checked, and only the valid ones are passed to
Hydra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import HydraException

from grpo_dist.assets import BUILTIN
from grpo_dist.config.command import AnyCommand
from grpo_dist.config.keys import (
    FLAGS,
    RENAMED,
    UNSET_BY_NULL,
    VALUES,
    ForeignKey,
    are_same,
    foreign_key,
    is_free_form,
    leaf_keys,
    nearest_keys,
    section_keys,
    unknown_key,
    verl_defaults,
    what_to_write,
)
from grpo_dist.config.problems import Problem, shown
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.errors import did_you_mean
from grpo_dist.redact import redact

RECIPE = "recipe"  # the group of published methods


@dataclass
class CommandLine:
    """The valid overrides, and the notes and problems of the others."""

    groups: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # in the order of their last mention
    names: dict[str, str] = field(default_factory=dict)  # by key: the name that it has on the line
    foreign: dict[str, tuple[ForeignKey, Any, str]] = field(default_factory=dict)  # of verl's keys
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read_command_line(overrides: Sequence[str | tuple[str, Any]], command: AnyCommand) -> CommandLine:
    """Sort overrides, as written on a command line or (key, value), into groups, values and problems; of a key the last
    one wins.
    """
    line = CommandLine()
    parser = OverridesParser.create()
    for written in overrides:
        if not isinstance(written, str):
            key, value = written
            override = Override(OverrideType.CHANGE, key.lstrip("+"), ValueType.ELEMENT, value)
            _add(line, override, _shown(f"{key.lstrip('+')}={value}"), command)
            continue
        text = " ".join(written.splitlines())  # Hydra's grammar knows no line breaks; a long mapping may have some
        try:
            text.encode()  # Python turns bytes that are not UTF-8 into lone surrogates
            override = parser.parse_override(text)
        except UnicodeEncodeError:
            line.problems.append(Problem(f"{text}: not UTF-8", (text.lstrip("+").partition("=")[0],)))
            continue
        except HydraException as error:
            line.problems.append(_unreadable(_shown(text), error, command.schema))
            continue
        _add(line, override, _shown(text).lstrip("+"), command)
    for key, foreign in line.foreign.items():
        _judge_foreign(line, key, *foreign)
    _choose_groups(line, command)
    return line


def _shown(text: str) -> str:
    """An override as messages may show it: the value of a secret is replaced."""
    key, equals, value = text.partition("=")
    return f"{key}{equals}{redact({key: value})[key]}"


def _add(line: CommandLine, override: Override, text: str, command: AnyCommand) -> None:
    schema: type[JobConfig] = command.schema
    name = key = override.key_or_group
    if command.takes_verls_keys and key in RENAMED and not override.is_sweep_override():
        line.notes.append(f"{key} is called {RENAMED[key]} in grpo_dist")
        key = RENAMED[key]
        text = f"{key}={text.partition('=')[2]}"
    known = not command.takes_verls_keys or key in leaf_keys(schema) or override.is_delete()
    foreign = None if known else foreign_key(key)
    if foreign is not None:
        line.foreign[key] = foreign, override.value(), text
        return
    options = command.group_options().get(key)
    problem: Problem | None = None
    if override.is_delete():
        files = " or ".join(file.name for file in command.files)
        problem = Problem(f"~{key}: keys cannot be removed; set a value, or null where {files} allows it", (key,))
    elif override.package is not None:
        problem = Problem(f"{text}: packages (@) are not supported", (key,))
    elif override.is_sweep_override():
        problem = Problem(f"{text}: a sweep is not supported; a list is written {text.replace('=', '=[', 1)}]", (key,))
    elif options is not None and not isinstance(override.value(), dict):
        problem = _take_option(line, key, str(override.value()), options, command)
    elif key in section_keys(schema) and not isinstance(override.value(), dict):
        below = [known for known in leaf_keys(schema) if known.startswith(f"{key}.")]
        names = dict.fromkeys(known.removeprefix(f"{key}.").partition(".")[0] for known in below)
        problem = Problem(f"{text}: {key} is a section; its keys are {', '.join(names)}", (key, *below))
    elif key not in leaf_keys(schema) and key not in section_keys(schema) and not is_free_form(key, schema):
        problem = Problem(
            unknown_key(key, schema) if key else f"{text}: the key is missing; write key=value",
            (key, *nearest_keys(key, schema)),
        )
    else:
        problem = _set(line, name, key, override.value(), command)
    if problem is not None:
        line.problems.append(problem)


def _set(line: CommandLine, name: str, key: str, value: Any, command: AnyCommand) -> Problem | None:
    """Set a key of the config, which the line calls `name`. Two names of it with two values are refused."""
    before = line.names.get(key, name)
    if command.takes_verls_keys and value is None and name in UNSET_BY_NULL:
        line.notes.append(f"no effect here: {name}=null: as without it")
        if before == name:
            line.values.pop(key, None)
        return None
    if command.takes_verls_keys and key in VALUES:
        value = _named_here(line, key, value)
    if before != name and line.values.get(key, value) != value:
        both = f"{before}={shown(line.values[key])}, {name}={shown(value)}"
        return Problem(f"{both}: two names of one key, {key}; set one of them", (key,))
    line.values.pop(key, None)  # keep the order of the last mention: a section may follow one of its keys
    line.values[key], line.names[key] = value, name
    return None


def _named_here(line: CommandLine, key: str, value: Any) -> Any:
    """A value of verl by its name here. In a list, what has none is left out beside others."""
    items = value if isinstance(value, list) else [value]
    here = [VALUES[key].get(item, item) if isinstance(item, str) else item for item in items]
    kept = [item for number, item in enumerate(here) if item is not None and item not in here[:number]]
    if here == items or not kept:
        return value
    named = [(item, own or "left out") for item, own in zip(items, here, strict=True) if item != own]
    line.notes += [f"{key}: {item} is {own} in grpo_dist" for item, own in named]
    return kept if isinstance(value, list) else kept[0]


def _take_option(line: CommandLine, group: str, option: str, options: list[str], command: AnyCommand) -> Problem | None:
    """Choose an option of a group. The last of two counts; recipes are refused, since two look like a sum of both."""
    if option not in options:
        own = next((known for known, (chosen, _) in command.chosen.items() if chosen == group), "")
        schema: type[JobConfig] = command.schema
        return Problem(_no_such_option(group, option, options, own), leaf_keys(schema))
    before = line.groups.get(group, option)
    line.groups[group] = option
    if before != option and group == RECIPE:
        both = f"{group}={before}, {group}={option}"
        return Problem(f"{both}: recipes are not combined; choose one, and set the keys of the other", (group,))
    if before != option:
        line.notes.append(f"{group}={before} has no effect: {group}={option} comes after it")
    return None


def _judge_foreign(line: CommandLine, key: str, foreign: ForeignKey, value: Any, text: str) -> None:
    default = verl_defaults().get(key, ...)
    only = (shown(line.values.get(foreign.same_as, default)),) if foreign.same_as else foreign.only
    taken = (*only, ... if foreign.same_as else default)
    if not (only or foreign.refused) or any(are_same(value, each) for each in taken):
        line.notes.append(f"no effect here: {text}: {'as without it' if foreign.refused else foreign.why}")
    elif foreign.refused:
        line.problems.append(Problem(f"{text}: not supported: {foreign.why}", (key,)))
    else:
        line.problems.append(Problem(f"{text}: only {' or '.join(only)} is supported: {foreign.why}", (key,)))


def _choose_groups(line: CommandLine, command: AnyCommand) -> None:
    for key, (group, option) in command.chosen.items():
        value = line.values.get(key)
        if value in (None, 0) or group in line.groups or BUILTIN in str(value):  # the default options are for these
            continue
        line.groups[group] = option
        line.notes.append(f"{group}={option} is used, because {key} is set and no {group}= is chosen")


def _unreadable(text: str, error: HydraException, schema: type[JobConfig]) -> Problem:
    key, equals, _ = text.lstrip("+").partition("=")
    if key in FLAGS:
        return Problem(f"{text}: {FLAGS[key]}; the keys are the same", (key,))
    if key.startswith("-"):
        name = key.lstrip("-").replace("-", "_")
        value = text.partition("=")[2] or "VALUE"
        advice = f"write {name}={value}" if name in leaf_keys(schema) else what_to_write(name, schema)
        flags = "the only flags are --help, --quiet and --full, and a key is written key=value"
        return Problem(f"{text}: {flags}; {advice}", (key,))
    if not equals:
        return Problem(f"{text or repr(text)}: not an override; write key=value", (key,))
    unclosed = [
        f"a {opened} is not closed" for opened, end in ("[]", "{}", "()") if text.count(opened) > text.count(end)
    ]
    reason = ", ".join(unclosed) or str(error).splitlines()[0]
    advice = f"""quote values with = , : [ ] {{ }} like this: "{key}='...'\""""
    return Problem(f"{text}: cannot be read ({reason}); {advice}", (key,))


def _no_such_option(group: str, option: str, options: list[str], own: str) -> str:
    hint = did_you_mean(option, options, f"{group}={{}}")
    if own and not hint:
        hint = f"; for one of your own write {own}={option}"
    return f"{group}={option}: no such option; there are {', '.join(options)}{hint}"
