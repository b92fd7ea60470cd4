"""A problem of a config, and the conversion of pydantic's errors into problems with uniform messages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from grpo_dist.assets import expanded
from grpo_dist.config.field_types import not_one_of
from grpo_dist.config.keys import free_form_keys, is_free_form, leaf_keys, nearest_keys, unknown_key
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.errors import ConfigError, did_you_mean
from grpo_dist.redact import redact, redact_text

MOST_LINE_TEXT = 1500  # characters of one problem
_KEY = re.compile(r"<(\w+(?:\.\w+)+)>")
Config = TypeVar("Config", bound=JobConfig)


@dataclass(frozen=True)
class Problem:
    """Something that makes a config invalid.

    Args:
        text: one line: key=value, what is wrong, what to do.
        keys: the dotted keys involved.
        missing_file: whether a file or folder is missing; `trainer.dry_run=config` only mentions that in a note.
    """

    text: str
    keys: tuple[str, ...]
    missing_file: bool = False


def shown(value: Any) -> str:
    """A value as written on the command line: null, true, [a,b]; secrets are replaced."""
    value = redact(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(shown(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{shown(item)}" for key, item in value.items()) + "}"
    return str(value)


def missing_path(key: str, path: str, kind: str) -> Problem:
    """A file or folder that a key names, and that is not there."""
    where = "" if expanded(path).is_absolute() else f" (looked in {Path.cwd()})"
    try:
        beside = os.listdir(expanded(path).parent)
    except OSError:  # the folder is missing too, or may not be read
        beside = []
    hint = did_you_mean(Path(path).name, beside)
    return Problem(f"{key}={path}: no such {kind}{where}{hint}", (key,), missing_file=True)


def between_keys(texts: Callable[[Config], Iterator[str]]) -> Callable[[Config], Iterator[Problem]]:
    """Make a rule of a function that yields its problems as texts, in which `<KEY>` stands for a key and its value."""

    def rule(config: Config) -> Iterator[Problem]:
        for text in texts(config):
            keys = tuple(_full_name(config, key) for key in _KEY.findall(text))
            yield Problem(with_values(config, text), keys)

    return rule


def with_values(config: JobConfig, text: str) -> str:
    """Put keys and values in the place of each `<KEY>`: `<rollout.n>` becomes `actor_rollout_ref.rollout.n=8`."""

    def key_and_value(match: re.Match[str]) -> str:
        key = _full_name(config, match[1])
        return f"{key}={shown(value_of(config, key))}"

    return _KEY.sub(key_and_value, text)


def _full_name(config: JobConfig, key: str) -> str:
    """Return the name of a key whose first section may be left out."""
    return key if hasattr(config, key.partition(".")[0]) else f"actor_rollout_ref.{key}"


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    return attrgetter(key)(config)


def with_value(config: Any, key: str, value: Any) -> Any:
    """A copy of a config, or section, with another value at a dotted key. Nothing is validated."""
    name, _, rest = key.partition(".")
    return config.model_copy(update={name: with_value(getattr(config, name), rest, value) if rest else value})


def config_error(problems: list[Problem]) -> ConfigError:
    """One error that lists all problems, one per line."""
    lines = list(dict.fromkeys(one_line(problem.text) for problem in problems))
    head = "the config has a problem:" if len(lines) == 1 else f"the config has {len(lines)} problems:"
    return ConfigError("\n  ".join([head, *lines]))


def one_line(text: str) -> str:
    """A text fit for display: secrets replaced, control characters escaped, the middle of a long text left out."""
    text = redact_text(text)
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    half = MOST_LINE_TEXT // 2
    return text if len(text) <= MOST_LINE_TEXT else f"{text[:half]} ... {text[-half:]}"


def schema_problems(error: ValidationError, schema: type[JobConfig]) -> list[Problem]:
    """Pydantic's errors as problems; a value that fits none of several types gives one problem."""
    problems: dict[tuple[str, str], Problem] = {}
    for finding in error.errors(include_url=False):
        problem = _problem(dict(finding), schema)
        same = (problem.keys[0], shown(finding["input"]))
        if same in problems:
            reason = problem.text.removeprefix(f"{same[0]}={same[1]}: ")
            problem = Problem(f"{problems[same].text}, or {reason}", problem.keys)
        problems[same] = problem
    return list(problems.values())


def path_of(location: tuple[int | str, ...], schema: type[JobConfig]) -> tuple[str, ...]:
    """The parts of the dotted key in pydantic's error location, without list positions and union members after it."""
    path: tuple[str, ...] = ()
    for part in location:
        key = ".".join(path)
        inside = is_free_form(key, schema) or (key in leaf_keys(schema) and key not in free_form_keys(schema))
        if isinstance(part, int) or inside:
            break
        path = (*path, part)
    return path


def _problem(finding: dict[str, Any], schema: type[JobConfig]) -> Problem:
    key = ".".join(path_of(finding["loc"], schema))
    if finding["type"] == "extra_forbidden":
        return Problem(unknown_key(key, schema), (key, *nearest_keys(key, schema)))
    if finding["loc"][-1] == "[key]":  # the name of an entry in a mapping
        return Problem(f"{key}: {_reason(finding)}", (key,))
    return Problem(f"{key}={shown(finding['input'])}: {_reason(finding)}", (key,))


def _reason(finding: dict[str, Any]) -> str:
    kind, value, context = finding["type"], finding["input"], finding.get("ctx", {})
    match kind:
        case "value_error":
            return str(context["error"])
        case "literal_error":
            names = context["expected"].replace(" or ", ", ").replace("'", "").split(", ")
            return not_one_of(value, names)
        case "missing":
            name = finding["loc"][-1]
            return "has too few entries" if isinstance(name, int) else f"lacks {name}; write {{{name}: ...}} beside it"
        case "too_short":
            return f"needs at least {context['min_length']} entry"
        case "too_long":
            return f"takes at most {context['max_length']} entries"
        case "string_too_short":
            return "must not be empty"
    wanted = {
        "int_type": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "text",
        "dict_type": "a mapping such as {name: value}",
        "tuple_type": "a list such as [a,b]",
        "model_type": "a section with keys of its own",
        "finite_number": "a finite number",
    }.get(kind, finding["msg"].removeprefix("Input should be "))
    hint = ""
    if isinstance(value, str) and value.lower() in ("none", "nil"):
        hint = " (an empty value is written null)"
    elif kind == "string_type" and isinstance(value, int | float):
        hint = " (for text that looks like a number or true/false add quotes inside quotes: \"'123'\")"
    elif kind == "bool_type":
        hint = ", without quotes"
    return f"must be {wanted}{hint}"
