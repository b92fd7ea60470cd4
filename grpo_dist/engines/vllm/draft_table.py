"""What responses to a prompt have gone on with: drafts of tokens from a prompt's earlier responses.

For each prompt a table has the tokens that followed the last few tokens, in all responses to it so far: those of other
epochs, of the group that is being sampled, and the response itself. Which one it proposes after a context is the
winner of a majority vote (Boyer and Moore, 1991), which needs one entry for a context. The approach is that of suffix
decoding (arXiv:2411.04975), with contexts of a few lengths in the place of a suffix tree, and a table for each prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

# Lengths of the contexts, in the order in which they are asked.
CONTEXTS = (6, 3)
# Entries in all tables of an engine, and the memory of one, about.
MOST_ENTRIES = 2_000_000
ENTRY_BYTES = 120
# An entry is a token above these bits, and in them its votes.
_BITS, _VOTES = 8, 255


class DraftTable:
    """The tokens that have followed in responses to one prompt, by the hash of what was before them."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._next)

    def add(self, tokens: list[int], start: int) -> None:
        """Count the tokens from `start` on, each with what is before it in `tokens`."""
        table = self._next
        for length in CONTEXTS:
            for place in range(max(start, length), len(tokens)):
                context, token = hash(tuple(tokens[place - length : place])), tokens[place]
                entry = table.get(context, token << _BITS)
                votes = entry & _VOTES
                if entry >> _BITS == token:
                    table[context] = entry + (votes < _VOTES)
                else:
                    table[context] = entry - 1 if votes > 1 else token << _BITS | 1

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most so many tokens that may follow `tokens`; fewer where the table knows none."""
        text = list(tokens[-CONTEXTS[0] :])
        given = len(text)
        while len(text) - given < most:
            found = (self._next.get(hash(tuple(text[-length:]))) for length in CONTEXTS if length <= len(text))
            entry = next((each for each in found if each is not None), None)
            if entry is None:
                break
            text.append(entry >> _BITS)
        return text[given:]


class DraftTables:
    """The tables of many prompts; those that have not been asked for longest are dropped when there are too many."""

    def __init__(self, most_entries: int = MOST_ENTRIES) -> None:
        self._tables: OrderedDict[int, DraftTable] = OrderedDict()
        self._most, self._entries = most_entries, 0

    @property
    def num_bytes(self) -> int:
        """Memory of all tables, about."""
        return self._entries * ENTRY_BYTES

    def of(self, prompt: int) -> DraftTable:
        """Return the table of a prompt, given by its hash; an empty one of a new prompt."""
        table = self._tables.setdefault(prompt, DraftTable())
        self._tables.move_to_end(prompt)
        return table

    def add(self, prompt: int, tokens: list[int], start: int) -> None:
        """Count tokens of a response, see `DraftTable.add`; `tokens` begins with the end of the prompt."""
        table = self.of(prompt)
        before = len(table)
        table.add(tokens, start)
        self._entries += len(table) - before
        while self._entries > self._most:  # the prompt's own too, if it alone has too many
            self._entries -= len(self._tables.popitem(last=False)[1])
