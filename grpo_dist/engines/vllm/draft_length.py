"""How many tokens to draft: as many as give the most tokens a second, by the engine's own times.

With few sequences an engine waits for its weights, and tokens that are checked beside the next one are nearly free;
with many it computes, and each costs its time. Where the one becomes the other differs by model, machine and phase of a
run, so the seconds of a step are means of the engine's own steps, by the number of tokens that they compute. What a
drafted token gives is its chance to be right. So of some bounds for that chance the best one is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# Bounds for the chance of a drafted token to count.
BOUNDS = (0.8, 0.6, 0.45, 0.3, 0.2, 0.1)
# Drafts are used where they promise so many times the tokens a second.
WORTH = 1.2
# Looking drafts up takes at most so much of a step.
LOOKING = 0.01
# In one step of so many the next longer drafts are tried, so that what has become better is found.
TRY_EVERY = 128
# Steps after which the seconds of a number of tokens are known; until then they are taken for those of fewer.
KNOWN = 3
# Weight of a new step in the means, once they are known.
NEWEST = 0.1
# A step counts as at most so many times the mean's seconds: something else ran on the machine.
SLOWEST = 1.25


@dataclass
class _Mean:
    steps: int = 0
    seconds: float = 0.0

    def note(self, seconds: float) -> None:
        self.steps += 1
        seconds = seconds if self.steps <= KNOWN else min(seconds, SLOWEST * self.seconds)
        self.seconds += max(NEWEST, 1 / self.steps) * (seconds - self.seconds)


@dataclass
class DraftLength:
    """How many tokens to draft for each running sequence."""

    _plain: dict[int, _Mean] = field(default_factory=dict)
    _drafted: dict[int, _Mean] = field(default_factory=dict)
    _asked: int = 0

    def seconds_to_look(self, sequences: int) -> float:
        """Return how long drafts may be looked up before the next step of so many sequences; 0.0 if it is not known."""
        plain = self._plain.get(_size(sequences)) if sequences else None
        return 0.0 if plain is None or plain.steps < KNOWN else LOOKING * plain.seconds

    def choose(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """Return how many tokens to draft for each sequence in the next step.

        Args:
            chances: for each running sequence, the chance of each token that can be drafted to count: that it and those
                before it are right. None where `seconds_to_look` is 0.
        """
        count, nothing = len(chances), [0] * len(chances)
        if not any(chances):
            return nothing
        options, rates = [nothing], [WORTH * count / self._plain[_size(count)].seconds]
        for bound in BOUNDS:
            lengths = [sum(chance >= bound for chance in each) for each in chances]
            if lengths != options[-1]:
                tokens = count + sum(sum(each[:length]) for each, length in zip(chances, lengths, strict=True))
                options.append(lengths)
                rates.append(tokens / self._seconds(count + sum(lengths)))
        best = rates.index(max(rates))
        self._asked += 1
        return options[min(best + (self._asked % TRY_EVERY == 0), len(options) - 1)]

    def note(self, computed: int, drafted: bool, seconds: float) -> None:
        """Take in the seconds of a step that has computed so many tokens, with drafts among them or without."""
        (self._drafted if drafted else self._plain).setdefault(_size(computed), _Mean()).note(seconds)

    def _seconds(self, computed: int) -> float:
        """What a step with drafts takes; of an unknown number of tokens what one of fewer does, so that it is tried."""
        own = self._drafted.get(_size(computed))
        if own is not None and own.steps >= KNOWN:
            return own.seconds
        known = [*self._plain.items(), *self._drafted.items()]
        return max(mean.seconds for size, mean in known if size <= _size(computed) and mean.steps >= KNOWN)


def _size(tokens: int) -> int:
    """Numbers of tokens whose steps have a mean together: the largest is 1.4 times the smallest."""
    return round(2 * math.log2(tokens))
