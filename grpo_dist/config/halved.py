"""Half of a setting, for a run that goes on after a GPU's memory was not enough."""

from __future__ import annotations

from grpo_dist.config.problems import with_value
from grpo_dist.config.rules import rule_problems
from grpo_dist.config.schema import RunConfig


def halved(config: RunConfig, setting: tuple[str, int] | None) -> RunConfig | None:
    """The config with half of a whole number.

    Args:
        config: a legal config.
        setting: dotted key, and the number that is in force; None: there is nothing to halve.

    Returns:
        None where half of it is not legal: a pass of no sequence, or one that does not hold the longest.
    """
    if setting is None or setting[1] < 2:
        return None
    key, value = setting
    smaller: RunConfig = with_value(config, key, value // 2)
    return None if any(key in problem.keys for problem in rule_problems(smaller)) else smaller
