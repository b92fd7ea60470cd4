"""What responses to a prompt have gone on with: drafts of tokens from a prompt's earlier responses.

For each prompt a table has the tokens that followed the last few tokens, in all responses to it so far: those of other
epochs, of the group that is being sampled, and the response itself. Which one it proposes after a context is the
winner of a majority vote (Boyer and Moore, 1991), which needs one entry for a context. The approach is that of suffix
decoding (arXiv:2411.04975), with contexts of a few lengths in the place of a suffix tree, and a table for each prompt.

A proposal's chance to be right is what proposals of its kind, by length of the context and number of votes, have been
among the last tokens. Whether a proposal is right shows in each token, whether it was drafted or not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

# Lengths of the contexts, in the order in which they are asked.
CONTEXTS = (6, 3, 2)
# Entries in all tables of an engine, and the memory of one, about.
MOST_ENTRIES = 2_000_000
ENTRY_BYTES = 120
# An entry is a token above these bits, and in them its votes.
_BITS, _VOTES = 8, 255
# Proposals with so many votes, or more, are of one kind.
MANY_VOTES = 4
# A kind's chance is the share of right ones of about so many proposals, and begins at none.
LAST_PROPOSALS = 64


class Chances:
    """How often proposals of each kind were right."""

    def __init__(self) -> None:
        self._of = [[0.0] * (MANY_VOTES + 1) for _ in CONTEXTS]

    def of(self, context: int, votes: int) -> float:
        """Return the share of right ones, by the place of the context's length in `CONTEXTS`."""
        return self._of[context][min(votes, MANY_VOTES)]

    def note(self, context: int, votes: int, right: bool) -> None:
        """Take in a proposal."""
        kind, votes = self._of[context], min(votes, MANY_VOTES)
        kind[votes] += (right - kind[votes]) / LAST_PROPOSALS


class DraftTable:
    """The tokens that have followed in responses to one prompt, by the hash of what was before them.

    Args:
        chances: of proposals, shared by all tables of an engine.
    """

    def __init__(self, chances: Chances) -> None:
        self._chances = chances
        self._next: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._next)

    def add(self, tokens: list[int], start: int) -> None:
        """Count the tokens from `start` on, each with what is before it in `tokens`."""
        table = self._next
        for place in range(start, len(tokens)):
            token, proposed = tokens[place], False
            for i, length in enumerate(CONTEXTS):
                if place < length:
                    continue
                context = hash(tuple(tokens[place - length : place]))
                entry = table.get(context, 0)  # no entry has no votes
                votes, right = entry & _VOTES, entry >> _BITS == token
                if votes and not proposed:
                    proposed = True
                    self._chances.note(i, votes, right)
                if votes and right:
                    table[context] = entry + (votes < _VOTES)
                else:
                    table[context] = entry - 1 if votes > 1 else token << _BITS | 1

    def draft(self, tokens: Sequence[int], most: int, least: float) -> tuple[list[int], list[float]]:
        """Return the tokens that may follow, and for each the chance that it and all before it are right.

        Args:
            tokens: what is there.
            most: at most so many.
            least: the last one's chance, at least.
        """
        text, chance, chances = list(tokens[-CONTEXTS[0] :]), 1.0, []
        given = len(text)
        for _ in range(most):
            known = ((i, self._next.get(hash(tuple(text[-n:])))) for i, n in enumerate(CONTEXTS) if n <= len(text))
            context, entry = next((each for each in known if each[1] is not None), (0, None))
            if entry is None:
                break
            chance *= self._chances.of(context, entry & _VOTES)
            if chance < least:
                break
            text.append(entry >> _BITS)
            chances.append(chance)
        return text[given:], chances


class DraftTables:
    """The tables of many prompts; those that have not been asked for longest are dropped when there are too many."""

    def __init__(self, most_entries: int = MOST_ENTRIES) -> None:
        self._tables: OrderedDict[int, DraftTable] = OrderedDict()
        self._most, self._entries, self._chances = most_entries, 0, Chances()

    @property
    def num_bytes(self) -> int:
        """Memory of all tables, about."""
        return self._entries * ENTRY_BYTES

    def of(self, prompt: int) -> DraftTable:
        """Return the table of a prompt, given by its hash; an empty one of a new prompt."""
        if prompt not in self._tables:
            self._tables[prompt] = DraftTable(self._chances)
        self._tables.move_to_end(prompt)
        return self._tables[prompt]

    def add(self, prompt: int, tokens: list[int], start: int) -> None:
        """Count tokens of a response, see `DraftTable.add`; `tokens` begins with the end of the prompt."""
        table = self.of(prompt)
        before = len(table)
        table.add(tokens, start)
        self._entries += len(table) - before
        while self._entries > self._most:  # the prompt's own too, if it alone has too many
            self._entries -= len(self._tables.popitem(last=False)[1])
