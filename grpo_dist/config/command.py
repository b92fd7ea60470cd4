"""What distinguishes the configs of the commands: their YAML files, their schema and their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from grpo_dist.config.schema_job import JobConfig

if TYPE_CHECKING:
    from grpo_dist.config.problems import Problem

Config = TypeVar("Config", bound=JobConfig)

CONFIG_DIR = Path(__file__).parent


@dataclass(frozen=True)
class Command(Generic[Config]):
    """A command's config.

    Attributes:
        module: the command, as `python -m MODULE`.
        purpose: one sentence for --help.
        examples: (what it does, overrides) for --help.
        file: its YAML file; folders beside it are its groups.
        shared: a YAML file with keys that other commands have too; None: there is none.
        schema: the class of the config.
        rules: each yields what is wrong between keys.
        notes: what a valid config's user may not expect, a line each.
        chosen: key -> (group, option): the option that is used where the key is set and the group is not.
        needed: example of a value, by key that has no default.
        takes_verls_keys: whether the keys of verl's GRPO scripts are known (foreign_keys.yaml).
    """

    module: str
    purpose: str
    examples: Sequence[tuple[str, str]]
    file: Path
    schema: type[Config]
    rules: Sequence[Callable[[Config], Iterator[Problem]]]
    notes: Callable[[Config], list[str]]
    chosen: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    needed: Mapping[str, str] = field(default_factory=dict)
    takes_verls_keys: bool = False
    shared: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files with all keys, their defaults and meanings."""
        return (self.file,) if self.shared is None else (self.file, self.shared)

    def problems(self, config: Config) -> list[Problem]:
        """Everything that is wrong between keys, or with files they name."""
        return [problem for rule in self.rules for problem in rule(config)]

    def group_options(self) -> dict[str, list[str]]:
        """The config groups and their options, sorted."""
        folders = sorted(path for path in self.file.parent.iterdir() if path.is_dir() and any(path.glob("*.yaml")))
        return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


# Any command, where only the names of keys matter.
AnyCommand = Command[Any]
