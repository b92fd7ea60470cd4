"""The dotted keys of the schema, the closest of them to an unknown key, and keys of others: verl's, and earlier ones;
and problems of keys, with uniform messages.

foreign_keys.yaml says how each key of others is handled; docs/config.md lists it. verl_defaults.yaml has all of verl's.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import yaml
from pydantic import ValidationError

from grpo_dist.assets import expanded
from grpo_dist.config.field_types import Mark, Section, not_one_of
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.errors import ConfigError, did_you_mean
from grpo_dist.redact import redact, redact_text

# Below this similarity, in [0, 1], of the last parts of two keys a hint misleads (learning_rate: clip_ratio).
_LEAST_SIMILARITY = 0.65
# A name of at most so many letters resembles many: foo and floor by 0.75.
_SHORT, _LEAST_OF_SHORT = 3, 0.8
# Keys this close to the best one are named beside it.
_TIE = 0.05
_MOST_HINTS = 3


@cache
def leaf_keys(schema: type[JobConfig] = RunConfig) -> tuple[str, ...]:
    """Return all keys of a command's config that hold a value, such as "data.train_batch_size"."""
    return tuple(key for key, kind in _walk(schema, "") if not _is_section(kind))


@cache
def section_keys(schema: type[JobConfig] = RunConfig) -> tuple[str, ...]:
    """Return all keys that hold other keys, such as "data"."""
    return tuple(key for key, kind in _walk(schema, "") if _is_section(kind))


@cache
def free_form_keys(schema: type[JobConfig] = RunConfig) -> tuple[str, ...]:
    """Return the keys whose value is a mapping in which the user may use any names, such as `reward_kwargs`."""
    return tuple(key for key, kind in _walk(schema, "") if str(kind).startswith("dict"))


def resume_mark(key: str, schema: type[JobConfig]) -> Mark | None:
    """Return the mark of the innermost field that holds `key` and has one; None: the key is part of the experiment."""
    section: Any = schema
    mark = None
    for name in key.split("."):
        if not _is_section(section) or name not in section.model_fields:
            break
        field = section.model_fields[name]
        mark = next((part for part in field.metadata if isinstance(part, Mark)), mark)
        section = field.annotation
    return mark


def flatten(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf; a list is one value."""
    if isinstance(section, Mapping) and section:
        for name, value in section.items():
            yield from flatten(value, f"{prefix}.{name}" if prefix else str(name))
    elif section != {}:
        yield prefix, section


def as_text(value: Any) -> str:
    """Return a value as text: strings as they are, others as JSON."""
    return str(value) if isinstance(value, str) else json.dumps(value, default=str)


def is_free_form(key: str, schema: type[JobConfig] = RunConfig) -> bool:
    """Say if `key` is inside a mapping in which the user may use any names."""
    return any(key.startswith(f"{parent}.") for parent in free_form_keys(schema))


def nearest_keys(key: str, schema: type[JobConfig] = RunConfig) -> list[str]:
    """Return the known keys that `key` most likely means, best first; empty if none is similar."""
    matcher = difflib.SequenceMatcher(autojunk=False)
    last = key.rpartition(".")[2]
    if (meant := meant_by(last, schema)) is not None:
        return [written.partition("=")[0] for written in meant]

    def similarity(known: str) -> float:
        if f".{known}".endswith(f".{key}"):  # rollout.n, for actor_rollout_ref.rollout.n, is a sure hit
            return 2.0
        parts = iter(known.split("."))
        if "." in key and known.endswith(f".{last}") and all(part in parts for part in key.split(".")):
            return 1.9  # actor.lr, for actor_rollout_ref.actor.optim.lr
        matcher.set_seqs(last, known.rpartition(".")[2])
        part = matcher.ratio()
        matcher.set_seqs(key, known)
        least = _LEAST_SIMILARITY if len(last) > _SHORT else _LEAST_OF_SHORT
        return part + matcher.ratio() if part >= least else 0.0

    ranked = sorted(((similarity(known), known) for known in leaf_keys(schema)), key=lambda pair: -pair[0])
    best = ranked[0][0]
    return [known for score, known in ranked[:_MOST_HINTS] if score and score >= best - _TIE]


def what_to_write(key: str, schema: type[JobConfig] = RunConfig) -> str:
    """Return the advice of a message in the place of an unknown key."""
    last = key.rpartition(".")[2]
    meant = meant_by(last, schema)
    hints, why = (nearest_keys(key, schema), "") if meant is None else (meant, ELSEWHERE[last].why)
    if not hints:
        return why or "--help says where all keys are listed"
    return f"did you mean {' or '.join(hints)}?{f' ({why})' if why else ''}"


def meant_by(name: str, schema: type[JobConfig]) -> list[str] | None:
    """Return the KEY or KEY=VALUE to write for a name of other libraries; []: nothing; None: it is not known here."""
    entry = ELSEWHERE.get(name)
    if entry is None:
        return None
    here = [written for written in entry.write if written.partition("=")[0] in leaf_keys(schema)]
    return here[:1] if here or not entry.write else None


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field.annotation
        if _is_section(field.annotation):
            yield from _walk(field.annotation, f"{prefix}{name}.")


def _is_section(kind: Any) -> TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


@cache
def verl_defaults() -> dict[str, Any]:
    """Return every key of verl with its default there, also those that are keys here."""
    return yaml.safe_load(Path(__file__).with_name("verl_defaults.yaml").read_text(encoding="utf-8"))


def are_same(value: Any, other: Any) -> bool:
    """Say if two values read the same on verl's command line."""
    return value == other or len({as_text(each).lower().replace("none", "null") for each in (value, other)}) == 1


_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("foreign_keys.yaml").read_text(encoding="utf-8"))
RENAMED: dict[str, str] = _TABLE["renamed"]
VALUES: dict[str, dict[str, str | None]] = _TABLE["values"]
UNSET_BY_NULL: list[str] = _TABLE["unset_by_null"]
FLAGS: dict[str, str] = _TABLE["flags"]


@dataclass(frozen=True)
class ForeignKey:
    """A key of verl, of another library or of an earlier version, that grpo_dist does not have.

    Attributes:
        why: why the key has no effect; if it is refused, what to use instead.
        only: the values that are accepted and ignored; any other value is an error. (): every value is accepted.
        same_as: the key here whose value alone is accepted and ignored; "": none.
        refused: whether setting the key is an error.
        write: what to write here, KEY or KEY=VALUE, of which the first is meant that the command has.
    """

    why: str = ""
    only: Sequence[str] = ()
    same_as: str = ""
    refused: bool = False
    write: Sequence[str] = ()


ELSEWHERE = {name: ForeignKey(**entry) for name, entry in _TABLE["elsewhere"].items()}
FOREIGN_KEYS = {key: ForeignKey(why, refused=True) for key, why in _TABLE["refused"].items()} | {
    key: ForeignKey(entry) if isinstance(entry, str) else ForeignKey(**entry)
    for key, entry in _TABLE["without_effect"].items()
}


def foreign_key(key: str) -> ForeignKey | None:
    """The entry for `key`: its own, that of the innermost section (`section.*`) with it, or that of any key of verl."""
    parts = key.split(".")
    sections = (".".join([*parts[:length], "*"]) for length in range(len(parts), 0, -1))
    entry = next((FOREIGN_KEYS[name] for name in (key, *sections) if name in FOREIGN_KEYS), None)
    if entry is None and key in verl_defaults() and key not in leaf_keys() and not is_free_form(key):
        return ForeignKey(f"only verl's default, {as_text(verl_defaults()[key])}, is; leave it out", refused=True)
    return entry


# --- problems --------------------------------------------------------------------------------------------------------
MOST_LINE_TEXT = 1500  # characters of one problem
_KEY = re.compile(r"<(\w+(?:\.\w+)+)>")
Config = TypeVar("Config", bound=JobConfig)


@dataclass(frozen=True)
class Problem:
    """Something that makes a config invalid.

    Args:
        text: one line: key=value, what is wrong, what to do.
        missing_file: whether code or a package is missing here; `trainer.dry_run=config` only mentions that in a note.
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
        return Problem(f"{key}: no such key; {what_to_write(key, schema)}", (key, *nearest_keys(key, schema)))
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
