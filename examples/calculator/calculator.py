"""A calculator as a tool: whatever sum the model writes before `=`, the calculator writes its value behind it."""

from __future__ import annotations

import re

from grpo_dist.agents import AgentLoop, Episode

# The text right before the call: numbers joined by + and -, such as 7+9+1.
EXPRESSION = re.compile(r"(\d+(?:[+-]\d+)*)=$")


class Calculator(AgentLoop):
    """Ends a turn at `=`, puts in the value, and lets the model go on.

    Args:
        max_calls: calls that are answered in an episode; after that the model does its own sums.
    """

    CALL = "="

    def __init__(self, max_calls: int = 8) -> None:
        self.max_calls = max_calls

    async def run(self, episode: Episode) -> None:
        """Answer calls until the model ends its response."""
        for _ in range(self.max_calls):
            turn = await episode.generate(stop=self.CALL)
            if turn.stop != self.CALL:
                return
            episode.append(evaluate(episode.text))
        await episode.generate()


def evaluate(text: str) -> str:
    """The value of the expression that `text` ends with; a question mark if there is none."""
    found = EXPRESSION.search(text)
    return str(sum(int(number) for number in re.findall(r"[+-]?\d+", found[1]))) if found else "?"
