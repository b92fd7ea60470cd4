"""What distinguishes the commands that train; `plan/commands.py` has a row for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from grpo_dist.config.problems import Problem, with_value
from grpo_dist.config.schema_job import JobConfig

Config = TypeVar("Config", bound=JobConfig)

CONFIG_DIR = Path(__file__).parent


@dataclass(frozen=True)
class Command(Generic[Config]):
    """A command's config, its rows and its trainer.

    Attributes:
        name: the command, as `grpo-dist NAME`.
        purpose: one sentence for --help.
        examples: (what it does, overrides) for --help.
        file: its YAML file; folders beside it are its groups.
        shared: a YAML file with keys that other commands have too; None: there is none.
        schema: the class of the config.
        rules: each yields what is wrong between keys.
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


def halved(config: Config, setting: tuple[str, int] | None, command: Command[Config]) -> Config | None:
    """Return the config with one integer setting halved, for a run that goes on after a GPU ran out of memory.

    Args:
        config: a valid config.
        setting: (dotted key, its current value); None: there is nothing to halve.
        command: whose config it is.

    Returns:
        The changed config; None if half the value is not valid: less than one sequence, or fewer tokens than the
        longest sequence.
    """
    if setting is None or setting[1] < 2:
        return None
    key, value = setting
    smaller: Config = with_value(config, key, value // 2)
    return None if any(key in problem.keys for problem in command.problems(smaller)) else smaller
