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
CONTEXTS = (8, 4, 2)
# Entries in all tables of an engine, and the memory of one, about.
MOST_ENTRIES = 1_000_000
ENTRY_BYTES = 200


class DraftTable:
    """The tokens that have followed in responses to one prompt."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], tuple[int, int]] = {}  # context -> (token, votes for it less those against)

    def __len__(self) -> int:
        return len(self._next)

    def add(self, tokens: Sequence[int], start: int) -> None:
        """Count the tokens from `start` on, each with what is before it in `tokens`."""
        table = self._next
        for place in range(max(start, 1), len(tokens)):
            token = tokens[place]
            for length in CONTEXTS:
                if length <= place:
                    context = tuple(tokens[place - length : place])
                    leader, votes = table.get(context, (token, 0))
                    if leader == token:
                        table[context] = token, votes + 1
                    elif votes > 1:
                        table[context] = leader, votes - 1
                    else:
                        table[context] = token, 1

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most so many tokens that may follow `tokens`; fewer where the table knows none."""
        text = list(tokens[-CONTEXTS[0] :])
        given = len(text)
        while len(text) - given < most:
            found = (self._next.get(tuple(text[-length:])) for length in CONTEXTS if length <= len(text))
            entry = next((each for each in found if each is not None), None)
            if entry is None:
                break
            text.append(entry[0])
        return text[given:]


class DraftTables:
    """The tables of many prompts; those that have not been asked for longest are dropped when there are too many."""

    def __init__(self, most_entries: int = MOST_ENTRIES) -> None:
        self._tables: OrderedDict[tuple[int, ...], DraftTable] = OrderedDict()
        self._most, self.entries = most_entries, 0

    @property
    def num_bytes(self) -> int:
        """Memory of all tables, about."""
        return self.entries * ENTRY_BYTES

    def of(self, prompt: tuple[int, ...]) -> DraftTable:
        """Return the table of a prompt, an empty one of a new prompt."""
        table = self._tables.setdefault(prompt, DraftTable())
        self._tables.move_to_end(prompt)
        return table

    def add(self, prompt: tuple[int, ...], tokens: Sequence[int], start: int) -> None:
        """Count tokens of a response, see `DraftTable.add`; `tokens` begins with the end of the prompt."""
        table = self.of(prompt)
        before = len(table)
        table.add(tokens, start)
        self.entries += len(table) - before
        while self.entries > self._most and len(self._tables) > 1:
            self.entries -= len(self._tables.popitem(last=False)[1])
        if self.entries > self._most:  # of one prompt
            self._tables.clear()
            self.entries = 0
