"""Turns the command line into a checked config, and a config into YAML.

Every override is checked here, since Hydra stops at the first mistake with a traceback, and only the valid ones are
passed to it. Hydra composes the YAML files, the schema checks every key, and rules check keys against each other. All
problems are reported together in one ConfigError. Imports neither torch nor Ray.
"""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, UnsupportedValueType
from pydantic import ValidationError

from grpo_dist.assets import BUILTIN, expanded, is_folder
from grpo_dist.assets.model_folder import read_adapter_folder
from grpo_dist.config import keys
from grpo_dist.config.command import AnyCommand, Command, Config
from grpo_dist.config.environment import Place, find_references, from_environment, recorded
from grpo_dist.config.keys import ForeignKey, Problem, config_error, flatten, is_free_form, leaf_keys, shown
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.config.schema_roles import ADAPTER_KEY, LORA_RANK
from grpo_dist.errors import DataError, did_you_mean
from grpo_dist.redact import redact, redact_text

RECIPE = "recipe"  # the group of published methods
_COPY = re.compile(r"\$\{([\w.]+)\}")  # an interpolation that is the whole value
WORKING_COPIES = "working_dir_files"  # Ray's folder for what `ray job submit --working-dir` sends along
# Keys of earlier versions, and at which value they changed no result (None: at any). Such runs are read without them.
GONE = {
    "trainer.expected_response_length": None,
    "trainer.stream_mini_batches": False,
    "actor_rollout_ref.rollout.draft_tokens": None,
}


@dataclass
class CommandLine:
    """The valid overrides, and the notes and problems of the others."""

    groups: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # in the order of their last mention
    names: dict[str, str] = field(default_factory=dict)  # by key: the name that it has on the line
    foreign: dict[str, tuple[ForeignKey, Any, str]] = field(default_factory=dict)  # of verl's keys
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def load_command(overrides: Sequence[str | tuple[str, Any]], command: Command[Config]) -> tuple[Config, list[str]]:
    """Compose the command's YAML file with groups and overrides, and check everything.

    Args:
        overrides: the command line, such as ["model=hf", "data.train_batch_size=64"]; from Python also pairs of key and
            value.

    Returns:
        The config, and notes for the user: settings that have no effect, choices made on their behalf and, with
        trainer.dry_run=config, code and packages that are not on this machine.

    Raises:
        ConfigError: lists every problem, one a line.
    """
    line, raw, references = _read(overrides, command)
    if command.lora_section:
        _take_adapter(raw, command.lora_section, line)
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
        raise config_error(keys.schema_problems(error, command.schema)) from None


def with_overrides(
    values: Mapping[str, Any], overrides: Sequence[str | tuple[str, Any]], command: Command[Config]
) -> Config:
    """A saved config ({}: the defaults) with keys set anew, and what a group changes. Rules are not checked.

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
    return cast(dict[str, Any], OmegaConf.to_container(_composed(command.file, command.shared, ()), resolve=True))


def _read(
    overrides: Sequence[str | tuple[str, Any]], command: AnyCommand
) -> tuple[CommandLine, dict[str, Any], dict[Place, str]]:
    """The overrides with what is wrong so far, the composed config with interpolations resolved, and its references.

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
            code = "; give code as text, FILE.py:NAME" if isinstance(error, UnsupportedValueType) else ""
            line.problems.append(Problem(f"{key}={shown(value)}: {str(error).splitlines()[0]}{code}", (key,)))
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
    _keep_run_dir(values, line)
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


def _missing_keys(raw: Any) -> Iterator[str]:
    return (key for key, value in flatten(raw) if value == MISSING)


def _hydra_problem(error: HydraException | OmegaConfBaseException) -> Problem:
    both = (error, error.__cause__)  # the first has the key; under a debugger OmegaConf's have a cause too
    cause = next((each for each in both if isinstance(each, OmegaConfBaseException)), error)
    key = getattr(cause, "full_key", None) or ""
    reason = str(cause).splitlines()[0]
    return Problem(f"{key}: {reason}" if key else reason, (key,))


@cache
def _composed(file: Path, shared: Path | None, groups: tuple[tuple[str, str], ...]) -> DictConfig:
    """A YAML file with these groups, on the shared one; cached: Hydra takes ten times as long as all the rest."""
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
        wrong_values = keys.schema_problems(error, command.schema)
        paths = {keys.path_of(finding["loc"], command.schema) for finding in error.errors(include_url=False)}
    # An interpolation that cannot be resolved has been reported, and its text is in the place of its value.
    wrong = {key for problem in wrong_values for key in problem.keys}
    written = OmegaConf.to_container(_composed(command.file, command.shared, tuple(line.groups.items())), resolve=False)
    texts = {key: str(value) for key, value in flatten(written) if key not in line.values}
    copied = {key: match[1] for key, text in texts.items() if (match := _COPY.fullmatch(text))}
    once = [problem for problem in wrong_values if not any(copied.get(key) in wrong for key in problem.keys)]
    line.problems += [problem for problem in once if "${" not in problem.text]
    defaults = default_values(command)
    for *sections, name in paths:
        section: Any = functools.reduce(operator.getitem, sections, raw)
        usual: Any = functools.reduce(lambda found, part: found.get(part, {}), sections, defaults)
        if name in usual:
            section[name] = usual[name]
        else:
            section.pop(name, None)
    try:
        return command.schema.model_validate(raw)
    except ValidationError:
        return None


# --- what else a config takes from its surroundings ------------------------------------------------------------------
def _keep_run_dir(raw: dict[str, Any], line: CommandLine) -> None:
    """Put a relative run directory into the home folder if the present one is a job's copy, and note it."""
    trainer: Any = raw.get("trainer")
    given = trainer.get("default_local_dir") if isinstance(trainer, dict) else None
    if not isinstance(given, str) or not given or expanded(given).is_absolute():
        return
    here = Path.cwd()
    if WORKING_COPIES in here.parts:
        trainer["default_local_dir"] = str(Path.home() / given)
        line.notes.append(
            f"trainer.default_local_dir={given}: results go to {trainer['default_local_dir']}, because Ray deletes the "
            f"working copy of this job ({here}); set an absolute path, on several machines one on a disk that they "
            "share"
        )


def _take_adapter(raw: dict[str, Any], section: str, line: CommandLine) -> None:
    """Put what an adapter says into LoRA's other keys; report what contradicts it, or has no effect beside it."""
    model: Any = functools.reduce(operator.getitem, section.split("."), raw)
    path, key = model.get(ADAPTER_KEY), f"{section}.{ADAPTER_KEY}"
    if not isinstance(path, str) or not is_folder(path):  # which the rules report
        return
    setting = f"{key}={shown(path)}"
    try:
        adapter = read_adapter_folder(path, setting)
    except DataError as error:
        line.problems.append(Problem(str(error), (key,)))
        return
    for name, own, value in ((LORA_RANK, "r", adapter.rank), ("lora_alpha", "lora_alpha", adapter.alpha)):
        given = f"{section}.{name}"
        if given in line.values and model[name] not in (0, value):
            why = (
                f"{given}={shown(model[name])}, {setting}: the adapter has {own}={value:g}, and training goes on "
                f"with that; leave {name} out"
            )
            line.problems.append(Problem(why, (given, key)))
    for given in (f"{section}.{name}" for name in ("target_modules", "exclude_modules")):
        if given in line.values:
            line.notes.append(f"{given} has no effect: the layers with factors are those of {setting}")
    model |= {
        LORA_RANK: adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapter.layers}),
        "exclude_modules": None,
    }


# --- the command line ----------------------------------------------------------------------------------------------
def read_command_line(overrides: Sequence[str | tuple[str, Any]], command: AnyCommand) -> CommandLine:
    """Sort overrides, as written or (key, value), into groups, values and problems; of a key the last one wins."""
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
        except HydraException as error:
            line.problems.append(_unreadable(_shown(text), error, command.schema))
        else:
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
    if command.takes_verls_keys and key in keys.RENAMED and not override.is_sweep_override():
        line.notes.append(f"{key} is called {keys.RENAMED[key]} in grpo_dist")
        key = keys.RENAMED[key]
        text = f"{key}={text.partition('=')[2]}"
    known = not command.takes_verls_keys or key in leaf_keys(schema) or override.is_delete()
    foreign = None if known else keys.foreign_key(key)
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
    elif key in keys.section_keys(schema) and not isinstance(override.value(), dict):
        below = [known for known in leaf_keys(schema) if known.startswith(f"{key}.")]
        names = dict.fromkeys(known.removeprefix(f"{key}.").partition(".")[0] for known in below)
        problem = Problem(f"{text}: {key} is a section; its keys are {', '.join(names)}", (key, *below))
    elif key not in leaf_keys(schema) and key not in keys.section_keys(schema) and not is_free_form(key, schema):
        why = f"{key}: no such key; {keys.what_to_write(key, schema)}"
        missing = f"{text}: the key is missing; write key=value"
        problem = Problem(why if key else missing, (key, *keys.nearest_keys(key, schema)))
    else:
        problem = _set(line, name, key, override.value(), command)
    if problem is not None:
        line.problems.append(problem)


def _set(line: CommandLine, name: str, key: str, value: Any, command: AnyCommand) -> Problem | None:
    """Set a key of the config, which the line calls `name`. Two names of it with two values are refused."""
    before = line.names.get(key, name)
    if command.takes_verls_keys and value is None and name in keys.UNSET_BY_NULL:
        line.notes.append(f"no effect here: {name}=null: as without it")
        if before == name:
            line.values.pop(key, None)
        return None
    if command.takes_verls_keys and key in keys.VALUES:
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
    here = [keys.VALUES[key].get(item, item) if isinstance(item, str) else item for item in items]
    kept = [item for number, item in enumerate(here) if item is not None and item not in here[:number]]
    if here == items or not kept:
        return value
    named = [(item, own or "left out") for item, own in zip(items, here, strict=True) if item != own]
    line.notes += [f"{key}: {item} is {own} in grpo_dist" for item, own in named]
    return kept if isinstance(value, list) else kept[0]


def _take_option(line: CommandLine, group: str, option: str, options: list[str], command: AnyCommand) -> Problem | None:
    """Choose an option of a group. The last of two counts; recipes are refused, since two look like a sum of both."""
    if option not in options:
        schema: type[JobConfig] = command.schema
        hint = did_you_mean(option, options, f"{group}={{}}")
        own = [known for known, (chosen, _) in command.chosen.items() if chosen == group]
        if own and not hint:
            hint = f"; for one of your own write {own[0]}={option}"
        return Problem(f"{group}={option}: no such option; there are {', '.join(options)}{hint}", leaf_keys(schema))
    before = line.groups.get(group, option)
    line.groups[group] = option
    if before != option and group == RECIPE:
        both = f"{group}={before}, {group}={option}"
        return Problem(f"{both}: recipes are not combined; choose one, and set the keys of the other", (group,))
    if before != option:
        line.notes.append(f"{group}={before} has no effect: {group}={option} comes after it")
    return None


def _judge_foreign(line: CommandLine, key: str, foreign: ForeignKey, value: Any, text: str) -> None:
    default = keys.verl_defaults().get(key, ...)
    only = (shown(line.values.get(foreign.same_as, default)),) if foreign.same_as else foreign.only
    taken = (*only, ... if foreign.same_as else default)
    if not (only or foreign.refused) or any(keys.are_same(value, each) for each in taken):
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
    if key in keys.FLAGS:
        return Problem(f"{text}: {keys.FLAGS[key]}; the keys are the same", (key,))
    if key.startswith("-"):
        name = key.lstrip("-").replace("-", "_")
        value = text.partition("=")[2] or "VALUE"
        advice = f"write {name}={value}" if name in leaf_keys(schema) else keys.what_to_write(name, schema)
        flags = "the only flags are --help, --quiet and --full, and a key is written key=value"
        return Problem(f"{text}: {flags}; {advice}", (key,))
    if not equals:
        return Problem(f"{text or repr(text)}: not an override; write key=value", (key,))
    unclosed = [opened for opened, end in ("[]", "{}", "()") if text.count(opened) > text.count(end)]
    reason = ", ".join(f"a {opened} is not closed" for opened in unclosed) or str(error).splitlines()[0]
    advice = f"""quote values with = , : [ ] {{ }} like this: "{key}='...'\""""
    return Problem(f"{text}: cannot be read ({reason}); {advice}", (key,))
