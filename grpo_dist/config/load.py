"""Turns the command line into a checked config, and a config into YAML.

Hydra composes the YAML files, the schema checks every key, and rules check keys against each other. All problems are
reported together in one ConfigError. Imports neither torch nor Ray.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from grpo_dist.assets import expanded
from grpo_dist.config.command import AnyCommand, Command, Config
from grpo_dist.config.environment import (
    Place,
    find_references,
    from_environment,
    keep_run_dir,
    recorded,
    take_adapter,
)
from grpo_dist.config.keys import flatten
from grpo_dist.config.overrides import CommandLine, read_command_line
from grpo_dist.config.problems import Problem, config_error, path_of, schema_problems, shown
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.redact import redact_text

_COPY = re.compile(r"\$\{([\w.]+)\}")  # an interpolation that is the whole value
# Keys of earlier versions, and at which value they changed no result (None: at any). Such runs are read without them.
GONE = {
    "trainer.expected_response_length": None,
    "trainer.stream_mini_batches": False,
    "actor_rollout_ref.rollout.draft_tokens": None,
}


def load_command(overrides: Sequence[str | tuple[str, Any]], command: Command[Config]) -> tuple[Config, list[str]]:
    """Compose the command's YAML file with groups and overrides, and check everything.

    Args:
        overrides: the command line, such as ["model=hf", "data.train_batch_size=64"]; from Python also pairs of key and
            value.

    Returns:
        The config, and notes for the user: settings that have no effect, choices made on their behalf and, with
        trainer.dry_run=config, files that do not exist on this machine.

    Raises:
        ConfigError: lists every problem, one a line.
    """
    line, raw, references = _read(overrides, command)
    if command.lora_section:
        wrong, idle = take_adapter(raw, command.lora_section, line.values)
        line.problems += wrong
        line.notes += idle
    config = _validate(raw, line, command)
    suspects = {key for problem in line.problems for key in problem.keys}
    broken = [] if config is None else command.problems(config)
    # A rule about a key that is itself wrong would report the default in its place.
    broken = [problem for problem in broken if not suspects.intersection(problem.keys)]
    if config is not None and config.trainer.dry_run == "config":
        line.notes[:0] = [f"a run here would end: {problem.text}" for problem in broken if problem.missing_file]
        broken = [problem for problem in broken if not problem.missing_file]
    line.problems += broken
    if line.problems or config is None:
        raise config_error(line.problems)
    config.references.update(references)
    line.notes += [problem.text for note in command.notes for problem in note(config)]
    return config, [redact_text(note) for note in line.notes]


def run_folder(overrides: Sequence[str | tuple[str, Any]], command: Command[Config]) -> Path:
    """The run's folder that such a config names; of the config itself only the names of keys and options are checked.

    Raises:
        ConfigError: there are no such keys or options.
    """
    line, raw, _ = _read(overrides, command)
    if line.problems:
        raise config_error(line.problems)
    return expanded(str(raw["trainer"]["default_local_dir"]))


def saved_values(values: Mapping[str, Any], command: Command[Config]) -> Config:
    """A config that a run has saved; keys that have come since then have their defaults. Rules are not checked.

    Raises:
        ConfigError: it has keys or values that this version does not know, or names variables that are not set here.
    """
    try:
        return command.schema.model_validate(from_environment(with_later_keys(values, command)))
    except ValidationError as error:
        raise config_error(schema_problems(error, command.schema)) from None


def with_overrides(
    values: Mapping[str, Any], overrides: Sequence[str | tuple[str, Any]], command: Command[Config]
) -> Config:
    """A config that a run has saved ({}: the defaults) with some keys set anew; a group changes what it says otherwise
    than the defaults. Rules are not checked.

    Raises:
        ConfigError: there are no such keys or options, or a value is not of its type.
    """
    line = read_command_line(overrides, command)
    if line.problems:
        raise config_error(line.problems)
    merged = OmegaConf.create(from_environment(with_later_keys(values, command)))
    of_groups = copy.deepcopy(_composed(command.file, command.shared, tuple(line.groups.items())))
    for key in _missing_keys(OmegaConf.to_container(of_groups)):  # others may copy it
        OmegaConf.update(of_groups, key, line.values.get(key, OmegaConf.select(merged, key)))
    composed = OmegaConf.to_container(of_groups, resolve=True)
    assert isinstance(composed, dict)
    usual = dict(flatten(default_values(command)))
    by_group = {key: value for key, value in flatten(composed) if value not in (usual.get(key, MISSING), MISSING)}
    for key, value in (by_group | line.values).items():
        OmegaConf.update(merged, key, value, merge=True, force_add=True)
    return saved_values(cast(dict[str, Any], OmegaConf.to_container(merged)), command)


def with_later_keys(values: Mapping[str, Any], command: AnyCommand) -> dict[str, Any]:
    """Return values that a run has saved, with the defaults of later keys and without keys that are gone."""
    merged = OmegaConf.merge(OmegaConf.create(default_values(command)), OmegaConf.create(dict(values)))
    later = cast(dict[str, Any], OmegaConf.to_container(merged))
    for key, without in GONE.items():
        *sections, name = key.split(".")
        section = functools.reduce(lambda found, part: found.get(part) or {}, sections, later)
        if without is None or section.get(name) == without:
            section.pop(name, None)
    return later


def readable_config(config: JobConfig) -> str:
    """The resolved config as YAML, with secrets replaced by `***`."""
    return as_yaml(recorded(config, config.model_dump(mode="json")))


def as_yaml(values: Mapping[str, Any]) -> str:
    """Plain values as YAML, in the order of their keys; what is read back is the same."""
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    # PyYAML writes this one character as it is, and reads a line end in its place
    return yaml.safe_dump(values, sort_keys=False) if "\x85" in text else text


def default_values(command: AnyCommand) -> dict[str, Any]:
    """The command's config without groups and overrides."""
    values = OmegaConf.to_container(_composed(command.file, command.shared, ()), resolve=True)
    assert isinstance(values, dict)
    return cast(dict[str, Any], values)


def _read(
    overrides: Sequence[str | tuple[str, Any]], command: AnyCommand
) -> tuple[CommandLine, dict[str, Any], dict[Place, str]]:
    """The overrides with what is wrong so far, the composed config as nested dicts with interpolations resolved and the
    run's folder in its place, and its references to the environment.

    Raises:
        ConfigError: the config cannot be composed.
    """
    line, references = read_command_line(overrides, command), {}
    try:
        composed = copy.deepcopy(_composed(command.file, command.shared, tuple(line.groups.items())))
    except (HydraException, OmegaConfBaseException) as error:
        raise config_error([*line.problems, _hydra_problem(error)]) from None
    for key, value in line.values.items():
        try:
            OmegaConf.update(composed, key, value, merge=True, force_add=True)
        except OmegaConfBaseException as error:
            line.problems.append(Problem(f"{key}={shown(value)}: {str(error).splitlines()[0]}", (key,)))
    try:
        raw = OmegaConf.to_container(composed, resolve=True)
        references = find_references(composed, raw)
    except OmegaConfBaseException as error:
        line.problems.append(_hydra_problem(error))
        raw = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(raw, dict)
    for key, name in _odd_names(raw):
        line.problems.append(Problem(f"{key}: names in a mapping must be text, and {shown(name)} is not", (key,)))
    for key in _missing_keys(raw):
        example = f"{key}={command.needed.get(key, 'VALUE')}"
        line.problems.append(Problem(f"{key}: must be set, for example {example}", (key,)))
    values = {str(key): value for key, value in raw.items()}
    line.notes += keep_run_dir(values)
    return line, values, references


def _odd_names(raw: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Remove names in mappings that are not strings; yields (key of the mapping, name)."""
    if isinstance(raw, list):
        for value in raw:
            yield from _odd_names(value, key)
    elif isinstance(raw, dict):
        for name in list(raw):
            if isinstance(name, str):
                yield from _odd_names(raw[name], f"{key}.{name}".lstrip("."))
            else:
                del raw[name]
                yield key, name


def _copied_keys(command: AnyCommand, line: CommandLine) -> dict[str, str]:
    """The keys whose value is that of another key, by the YAML files, with that key; not those that are set."""
    raw = OmegaConf.to_container(_composed(command.file, command.shared, tuple(line.groups.items())), resolve=False)
    assert isinstance(raw, dict)
    copied = {key: match[1] for key, value in flatten(raw) if (match := _COPY.fullmatch(str(value)))}
    return {key: source for key, source in copied.items() if key not in line.values}


def _missing_keys(raw: Any) -> Iterator[str]:
    return (key for key, value in flatten(raw) if value == MISSING)


def _hydra_problem(error: HydraException | OmegaConfBaseException) -> Problem:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None) or ""
    reason = str(cause).splitlines()[0]
    return Problem(f"{key}: {reason}" if key else reason, (key,))


@cache
def _composed(file: Path, shared: Path | None, groups: tuple[tuple[str, str], ...]) -> DictConfig:
    """A YAML file with these group options, on top of the shared one. Cached, because Hydra takes ten times as long as
    all the rest.
    """
    with initialize_config_dir(str(file.parent.resolve()), version_base="1.3"):
        own = compose(file.stem, overrides=[f"{group}={option}" for group, option in groups])
    if shared is None:
        return own
    merged = OmegaConf.merge(OmegaConf.load(shared), own)
    assert isinstance(merged, DictConfig)
    OmegaConf.set_struct(merged, True)
    return merged


def _validate(raw: dict[str, Any], line: CommandLine, command: Command[Config]) -> Config | None:
    """Validate the config. A wrong value is replaced by its default, so that the rules of other keys can still run.

    What is wrong with a key that another one copies is said once.
    """
    try:
        return command.schema.model_validate(raw)
    except ValidationError as error:
        wrong_values = schema_problems(error, command.schema)
        paths = {path_of(finding["loc"], command.schema) for finding in error.errors(include_url=False)}
    # An interpolation that cannot be resolved has been reported, and its text is in the place of its value.
    wrong = {key for problem in wrong_values for key in problem.keys}
    copied = _copied_keys(command, line)
    once = [problem for problem in wrong_values if not any(copied.get(key) in wrong for key in problem.keys)]
    line.problems += [problem for problem in once if "${" not in problem.text]
    defaults = default_values(command)
    for path in paths:
        _restore_default(raw, defaults, path)
    try:
        return command.schema.model_validate(raw)
    except ValidationError:
        return None


def _restore_default(raw: Any, defaults: Any, path: Sequence[str]) -> None:
    *sections, name = path
    for section in sections:
        raw, defaults = raw[section], defaults.get(section, {})
    if name in defaults:
        raw[name] = defaults[name]
    else:
        raw.pop(name, None)
