"""The tokens of all calls of an episode, however they go on from one another, each different one once.

They are a row of training. Behind the prompt of the first call the tokens stand in the order in which their calls
ended. `predecessors` says which token each one follows (protocol/branches.py). What a call has sampled is new, even
where another call has sampled the same; what it was asked stands there once, however many calls were asked it.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_dist.engines.base import Response

NO_VERSION = -1  # of weights, for what none have sampled


class TokenTree:
    """The tokens, and of each one what a row of training has of it.

    Args:
        prompt_ids: the prompt of the first call.
        most: different tokens that there may be, the prompt's among them.

    Attributes:
        prompt_ids: that prompt.
        response: all that stands behind it.
    """

    def __init__(self, prompt_ids: Sequence[int], most: int) -> None:
        self.prompt_ids, self.most = list(prompt_ids), most
        self.response = Response([], [], False, [], mask=[], num_turns=0, predecessors=[])
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
        place = self._extend(put_in, [0.0] * count, [NO_VERSION] * count, 0, place)
        return self._extend(sampled.token_ids, sampled.log_probs, sampled.weight_versions, 1, place)

    def _extend(
        self, token_ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int], mask: int, place: int
    ) -> int:
        row = self.response
        assert row.mask is not None
        assert row.predecessors is not None
        for token in token_ids:
            self._next.setdefault((place, token), len(row.predecessors))
            row.predecessors.append(place)
            place = len(row.predecessors) - 1
        row.token_ids.extend(token_ids)
        row.log_probs.extend(log_probs)
        row.weight_versions.extend(versions)
        row.mask.extend([mask] * len(token_ids))
        return place
