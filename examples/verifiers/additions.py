"""An environment of verifiers 0.4: additions of three-digit numbers, answered by `#### SUM`. Knows only verifiers."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__version__ = "0.1.0"
__all__ = ["Additions"]


class Sum(vf.TaskData):
    """A question, and what is right."""

    answer: int


class Addition(vf.Task[Sum]):
    """One addition."""

    @vf.reward()
    async def right(self, trace: vf.Trace) -> float:
        """1 for the right sum."""
        found = re.search(r"#### (\d+)", str(trace.nodes[-1].message.content))
        return float(found is not None and int(found[1]) == self.data.answer)

    @vf.metric()
    async def characters(self, trace: vf.Trace) -> float:
        """The length of the answer."""
        return float(len(str(trace.nodes[-1].message.content)))


class Additions(vf.Taskset[Addition, vf.TasksetConfig]):
    """The same 4,000 additions each time."""

    def load(self) -> Iterator[Addition]:
        """Make them; no two are the same."""
        for number in random.Random(0).sample(range(900 * 900), 4000):
            a, b = 100 + number // 900, 100 + number % 900
            yield Addition(Sum(prompt=f"{a}+{b}=?", answer=a + b), self.config.task)
