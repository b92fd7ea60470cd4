"""Keys that grpo_dist does not have, from verl or from earlier versions of grpo_dist, and how each is handled.

The table is foreign_keys.yaml; docs/config.md lists it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RENAMED: dict[str, str] = _TABLE["renamed"]
FLAGS: dict[str, str] = _TABLE["flags"]


@dataclass(frozen=True)
class Elsewhere:
    """What other libraries call by a name that is none here.

    Attributes:
        write: what to write here, KEY or KEY=VALUE, of which the first is meant that the command has.
        why: what else there is to say.
    """

    write: tuple[str, ...]
    why: str


ELSEWHERE = {
    name: Elsewhere(tuple(entry.get("write", ())), entry.get("why", "")) for name, entry in _TABLE["elsewhere"].items()
}


@dataclass(frozen=True)
class ForeignKey:
    """A key of verl, or of an earlier version, that grpo_dist does not have.

    Attributes:
        why: why the key has no effect; if it is refused, what to use instead.
        only: the values that are accepted and ignored; any other value is an error. (): every value is accepted.
        refused: whether setting the key is an error.
    """

    why: str
    only: tuple[str, ...] = ()
    refused: bool = False


def _without_effect(entry: str | dict[str, Any]) -> ForeignKey:
    return ForeignKey(entry) if isinstance(entry, str) else ForeignKey(entry["why"], tuple(entry["only"]))


FOREIGN_KEYS = {key: _without_effect(entry) for key, entry in _TABLE["without_effect"].items()} | {
    key: ForeignKey(why, refused=True) for key, why in _TABLE["refused"].items()
}


def foreign_key(key: str) -> ForeignKey | None:
    """The entry for `key`: its own, or that of the innermost section (`section.*`) that contains it."""
    if key in FOREIGN_KEYS:
        return FOREIGN_KEYS[key]
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        found = FOREIGN_KEYS.get(".".join(parts[:length]) + ".*")
        if found is not None:
            return found
    return None
