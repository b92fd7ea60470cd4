"""The tokens of all calls of an episode, however they go on from one another, each different one once.

They are a row of training. Behind the prompt of the first call the tokens stand in the order in which their calls
ended. `predecessors` says which token each one follows (protocol/sequences.py). What a call has sampled is new, even
where another call has sampled the same; what it was asked stands there once, however many calls were asked it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_dist.engines.base import Response
from grpo_dist.protocol.sequences import unknown_routes

NO_VERSION = -1  # of weights, for what none have sampled


class TokenRoutes:
    """The recorded experts of an episode's tokens by their places, where the engine has recorded them.

    A token keeps those of the call that computed it first: with these it, or what follows it, was sampled. So what a
    call must bring are those of the last tokens that it was asked: it goes on behind a token that was sampled last.
    """

    def __init__(self) -> None:
        self._rows: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def num_new(self, place: int, predecessors: Sequence[int], length: int) -> int:
        """Return how many of the last tokens have none, of a text of this length that ends at `place`."""
        count = 0 if self._rows else length
        while count < length and place not in self._rows:
            place, count = predecessors[place] if place >= 0 else place - 1, count + 1
        return count

    def add(self, routes: np.ndarray | None, place: int, predecessors: Sequence[int]) -> None:
        """Take those of a call whose last token is at `place`; that one has none."""
        for row in () if routes is None else routes[-2::-1]:
            place = predecessors[place] if place >= 0 else place - 1
            if place in self._rows:
                break
            self._rows[place] = row

    def column(self, prompt: int, response: int) -> np.ndarray | None:
        """Return those of so many tokens of the prompt and the response; None if none are recorded."""
        if not self._rows:
            return None
        column = unknown_routes(prompt + response, next(iter(self._rows.values()))[None])
        for place, row in self._rows.items():
            column[prompt + place] = row
        return column


def extend(
    row: Response, token_ids: Sequence[int], mask: int, log_probs: Sequence[float], versions: Sequence[int], place: int
) -> None:
    """Put tokens behind a row that grows; the first of them follows the one at `place`."""
    assert row.mask is not None
    assert row.predecessors is not None
    first, count = len(row.token_ids), len(token_ids)
    row.predecessors.extend([place, *range(first, first + count - 1)][:count])
    row.token_ids.extend(token_ids)
    row.mask.extend([mask] * count)
    row.log_probs.extend(log_probs)
    row.weight_versions.extend(versions)


class TokenTree:
    """The tokens, and of each one what a row of training has of it.

    Args:
        prompt_ids: the prompt of the first call.
        most: different tokens that there may be, the prompt's among them.

    Attributes:
        prompt_ids: that prompt.
        response: all that stands behind it.
        routes: the recorded experts of all of them.
    """

    def __init__(self, prompt_ids: Sequence[int], most: int) -> None:
        self.prompt_ids, self.most = list(prompt_ids), most
        self.response = Response([], [], False, [], mask=[], num_turns=0, predecessors=[])
        self.routes = TokenRoutes()
        self._next = {(place - 1, token): place for place, token in enumerate(prompt_ids, -len(self.prompt_ids))}

    def __len__(self) -> int:
        return len(self.response.token_ids)

    def walk(self, token_ids: Sequence[int], place: int | None = None) -> tuple[int, int]:
        """Go along tokens from a place, or from the very beginning, as far as they are there.

        Returns:
            (the place of the last one; how many they are).
        """
        place = -len(self.prompt_ids) - 1 if place is None else place
        for i, token in enumerate(token_ids):
            if (place_behind := self._next.get((place, token))) is None:
                return place, i
            place = place_behind
        return place, len(token_ids)

    def room(self, num_new: int) -> int:
        """Tokens that are left for what a call samples that puts in so many new ones."""
        return self.most - len(self.prompt_ids) - len(self) - num_new

    def known_routes(self, asked: Sequence[int], place: int | None, length: int) -> int:
        """Return how many tokens of a prompt of this length, with what is asked behind a place, need no experts."""
        if not self.routes:
            return 0
        place, known = self.walk(asked, place)
        length -= len(asked) - known
        return length - self.routes.num_new(place, self.response.predecessors or (), length)

    def add(self, asked: Sequence[int], sampled: Response, place: int | None = None) -> int | None:
        """Add what a call was asked behind a place, or from the very beginning, and what it sampled.

        Returns:
            The place of the last token; None: there is no room for them, and nothing was added.
        """
        place, known = self.walk(asked, place)
        put_in = list(asked[known:])
        count = len(put_in)
        if self.room(count) < len(sampled.token_ids):
            return None
        place = self._extend(put_in, 0, [0.0] * count, [NO_VERSION] * count, place)
        place = self._extend(sampled.token_ids, 1, sampled.log_probs, sampled.weight_versions, place)
        self.routes.add(sampled.routes, place, self.response.predecessors or ())
        return place

    def _extend(
        self, token_ids: Sequence[int], mask: int, log_probs: Sequence[float], versions: Sequence[int], place: int
    ) -> int:
        extend(self.response, token_ids, mask, log_probs, versions, place)
        for new, token in enumerate(token_ids, len(self) - len(token_ids)):
            self._next.setdefault((place, token), new)
            place = new
        return place
