"""Halves a batch size or token budget, for a run that continues after a GPU ran out of memory."""

from __future__ import annotations

from grpo_dist.config.command import Command, Config
from grpo_dist.config.problems import with_value


def halved(config: Config, setting: tuple[str, int] | None, command: Command[Config]) -> Config | None:
    """The config with one integer setting halved.

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
