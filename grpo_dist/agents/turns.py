"""Whose turns the tokens of an episode are, and what these have earned: for credit by step and by agent."""

from __future__ import annotations

import math
import numbers
from typing import Any

from grpo_dist.algorithms.advantage.inputs import agent_id
from grpo_dist.plugins.registry import described


class Turns:
    """The turns of an episode, in the order in which they ended.

    Attributes:
        spans: of each turn its first token in the response, the one behind its last, and the agent's name. A turn that
            found no room in the row has no tokens.
        rewards: by the last token of their turn; of one without tokens by that of its agent's turn before it, and by
            -1 where there is none: an estimator passes rewards on to what was sampled before them.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[int, int, str]] = []
        self.rewards: dict[int, float] = {}

    def reward(self, value: float, turn: int | None = None, agent_name: str | None = None) -> None:
        """See `Episode.add_step_reward`."""
        spans = [span for span in self.spans if agent_name in (None, span[2])]
        if not spans or (turn is not None and not 0 <= turn < len(spans)):
            asked = f"turn={turn}, agent_name={agent_name!r}"
            raise IndexError(f"episode.add_step_reward({asked}): {len(spans)} turns were sampled that it could be for")
        end, name = len(spans) if turn is None else turn + 1, spans[-1 if turn is None else turn][2]
        place = max((end - 1 for first, end, whose in spans[:end] if end > first and whose == name), default=-1)
        self.rewards[place] = self.rewards.get(place, 0.0) + finite("episode.add_step_reward", value)

    def step_rewards(self, num_tokens: int) -> list[float]:
        """Return the reward on each token; nan: none."""
        return [self.rewards.get(token, math.nan) for token in range(num_tokens)]

    def agent_ids(self, num_tokens: int) -> list[int]:
        """Return the number of each token's agent (`algorithms.advantage.agents`); 0: it was put in."""
        ids = [0] * num_tokens
        for first, end, name in self.spans:
            ids[first:end] = [agent_id(name)] * (end - first)
        return ids


def finite(name: str, value: Any) -> float:
    """Return a number that a loop has set.

    Raises:
        ValueError: it is no finite number.
    """
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{name} = {described(value)}: must be a finite number")
    return float(value)
