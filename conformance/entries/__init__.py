"""The cases, before they are files: one entry for each objective, in the table of its kind.

Expected numbers come from the papers' formulas in `conformance/papers`, never from grpo_dist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# (name of the case, scenario, settings of its own, what it probes)
Probe = tuple[str, str, Mapping[str, Any], str]


def probed(entry: Any, scenarios: Mapping[str, Any]) -> Iterator[tuple[str, Any, Mapping[str, Any], str]]:
    """The cases of an entry, scenarios by themselves: those of its `scenarios` by name, and those of `also`."""
    plain: list[Probe] = [(name, name, {}, scenarios[name].probes) for name in entry.scenarios]
    for title, name, settings, probes in (*plain, *entry.also):
        yield title, scenarios[name], settings, probes
