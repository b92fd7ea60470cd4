"""How many tokens to draft: what has given most tokens a second in an engine's own steps.

With few sequences an engine waits for its weights, and tokens that are checked beside the next one are nearly free;
with many it computes, and each costs its time. Where the one becomes the other, and how many drafts are right, differs
by model, machine and phase of a run. So for each number of running sequences (up to the next power of two) the lengths
0, 1, 2, 4, ... have means of their last steps, and the best one is used. Its neighbours are tried until they are known,
and then in one step of `TRY_EVERY`, by turns, so that what has become better is found.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# A length at half the best rate costs 1 / TRY_EVERY of the time, since it is tried so seldom.
TRY_EVERY = 128
# Steps after which a length is known.
KNOWN = 3
# Weight of a new step in the means, once a length is known.
NEWEST = 0.1
# A step counts as at most so many times the mean's seconds: something else ran on the machine.
SLOWEST = 1.25


@dataclass
class _Rate:
    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def note(self, tokens: float, seconds: float) -> None:
        self.steps += 1
        share = max(NEWEST, 1 / self.steps)
        seconds = seconds if self.steps <= KNOWN else min(seconds, SLOWEST * self.seconds)
        self.tokens += share * (tokens - self.tokens)
        self.seconds += share * (seconds - self.seconds)

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class _Level:
    """What is known of about so many sequences: a rate for each length; the place of the best one."""

    rates: list[_Rate]
    best: int = 0
    asked: int = 0

    def place(self) -> int:
        self.asked += 1
        beside = [place for place in (self.best + 1, self.best - 1) if 0 <= place < len(self.rates)]
        if self.rates[self.best].steps < KNOWN:
            return self.best
        unknown = [place for place in beside if self.rates[place].steps < KNOWN]
        if unknown:
            return unknown[0]
        turn, rest = divmod(self.asked, TRY_EVERY)
        return self.best if rest else beside[turn % len(beside)]

    def decide(self) -> None:
        known = [place for place, rate in enumerate(self.rates) if rate.steps >= KNOWN]
        self.best = max(known, key=lambda place: self.rates[place].value, default=0)


@dataclass
class DraftLength:
    """The best length of drafts at a number of running sequences.

    Args:
        most: the longest draft, at least 1.

    Attributes:
        lengths: all lengths, from none to the longest.
    """

    most: int
    lengths: list[int] = field(init=False)
    _levels: dict[int, _Level] = field(default_factory=dict)

    def __post_init__(self) -> None:
        powers = [2**k for k in range(self.most.bit_length())]
        self.lengths = [0, *(power for power in powers if power < self.most), self.most]

    def choose(self, sequences: int) -> int:
        """Return how many tokens to draft for each of the running sequences in the next step."""
        return self.lengths[self._level(sequences).place()]

    def note(self, sequences: int, length: int, tokens: int, seconds: float) -> None:
        """Take in a step: how many tokens it gave all its sequences, with drafts of that length or shorter."""
        level = self._level(sequences)
        level.rates[self.lengths.index(length)].note(tokens, seconds)
        level.decide()

    def _level(self, sequences: int) -> _Level:
        return self._levels.setdefault((sequences - 1).bit_length(), _Level([_Rate() for _ in self.lengths]))
