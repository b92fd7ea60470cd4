"""One problem of a config, and how pydantic's findings become problems with one form of message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from grpo_dist.config.field_types import not_one_of
from grpo_dist.config.keys import nearest_keys, unknown_key
from grpo_dist.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """Something that makes a config unusable.

    Args:
        text: one line: key=value, what is wrong, what to do.
        keys: the dotted keys it is about.
        missing_file: a file or folder is not there. A dry run may still show its plan.
    """

    text: str
    keys: tuple[str, ...]
    missing_file: bool = False


def shown(value: Any) -> str:
    """A value as one writes it on the command line: null, true, [a,b]."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(shown(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{shown(item)}" for key, item in value.items()) + "}"
    return str(value)


def config_error(problems: list[Problem]) -> ConfigError:
    """One error that lists every problem, one a line."""
    lines = list(dict.fromkeys(problem.text for problem in problems))
    head = "the config has a problem:" if len(lines) == 1 else f"the config has {len(lines)} problems:"
    return ConfigError("\n  ".join([head, *lines]))


def schema_problems(error: ValidationError) -> list[Problem]:
    """The findings of pydantic, one problem for each key."""
    return [_problem(dict(finding)) for finding in error.errors(include_url=False)]


def _problem(finding: dict[str, Any]) -> Problem:
    parts = [part for part in finding["loc"] if isinstance(part, str)]
    key = ".".join(parts)
    if finding["type"] == "extra_forbidden":
        return Problem(unknown_key(key), (key, *nearest_keys(key)))
    if finding["type"] == "missing" and not isinstance(finding["loc"][-1], int):
        return Problem(f"{key}: missing; it has no default outside grpo.yaml", (key,))
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
            return "has too few entries"
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
