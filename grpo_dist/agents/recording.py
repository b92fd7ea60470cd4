"""The calls of an agent that owns its loop, recorded token by token; they become one row of training.

Such an agent sends text to an endpoint, and the chat template renders the whole conversation anew for each call. The
tokenizer may cut what the policy wrote into other tokens than those that it sampled. So where the text of a call begins
with all that an earlier call saw and sampled, the tokens of that call stand there. Where it does not (the agent has
shortened the history, asks a sub-agent, or the template drops earlier reasoning), the prompt is as it was rendered, and
a branch begins at the first token that no call has had there.

The row is a tree, which has each different token once. Behind the prompt of the first call the tokens stand in the
order in which their calls ended. `predecessors` says which token each one follows (protocol/sequences.py). What a call
has sampled is new, even where another has sampled the same; what calls were asked stands there once.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from grpo_dist.engines.base import RequestRefused, Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.protocol.sequences import unknown_routes

NO_VERSION = -1  # of weights, for what none have sampled


class TokenRoutes:
    """The recorded experts of an episode's tokens by their places, where the engine has recorded them.

    A token keeps those of the call that computed it first: with these it, or what follows it, was sampled. So what a
    call must bring are those of the last tokens that it was asked: it goes on behind a token that was sampled last.
    """

    def __init__(self) -> None:
        self._rows: dict[int, np.ndarray] = {}

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


def extend(row: Response, added: Response | Sequence[int], place: int) -> None:
    """Put what was sampled, or tokens that nobody has, behind a row that grows; they follow the token at `place`."""
    assert row.mask is not None
    assert row.predecessors is not None
    mask = int(isinstance(added, Response))
    if not isinstance(added, Response):
        added = Response(list(added), [0.0] * len(added), False, [NO_VERSION] * len(added))
    first, count = len(row.token_ids), len(added.token_ids)
    row.predecessors.extend([place, *range(first, first + count - 1)][:count])
    row.token_ids.extend(added.token_ids)
    row.mask.extend([mask] * count)
    row.log_probs.extend(added.log_probs)
    row.weight_versions.extend(added.weight_versions)


class TokenTree:
    """The tokens, and of each one what a row of training has of it; `response` is all that stands behind the prompt.

    Args:
        prompt_ids: the prompt of the first call.
        most: different tokens that there may be, the prompt's among them.
    """

    def __init__(self, prompt_ids: Sequence[int], most: int) -> None:
        self.prompt_ids, self.most = list(prompt_ids), most
        self.response = Response([], [], False, [], mask=[], num_turns=0, predecessors=[])
        self.routes = TokenRoutes()
        self._next = {(place - 1, token): place for place, token in enumerate(prompt_ids, -len(self.prompt_ids))}

    def __len__(self) -> int:
        return len(self.response.token_ids)

    def walk(self, token_ids: Sequence[int], place: int | None = None) -> tuple[int, int]:
        """Go along tokens from a place, or the beginning, while they are there: the last one's place, and how many."""
        place = -len(self.prompt_ids) - 1 if place is None else place
        for i, token in enumerate(token_ids):
            if (place_behind := self._next.get((place, token))) is None:
                return place, i
            place = place_behind
        return place, len(token_ids)

    def room(self, asked: Sequence[int], place: int | None) -> int:
        """Tokens that are left for what a call samples that was asked these behind a place."""
        num_new = len(asked) - self.walk(asked, place)[1]
        return self.most - len(self.prompt_ids) - len(self) - num_new

    def known_routes(self, asked: Sequence[int], place: int | None, length: int) -> int:
        """Return how many tokens of a prompt of this length, with what is asked behind a place, need no experts."""
        place, known = self.walk(asked, place)
        length -= len(asked) - known
        return length - self.routes.num_new(place, self.response.predecessors or (), length)

    def add(self, asked: Sequence[int], sampled: Response, place: int | None = None) -> int | None:
        """Add what a call was asked behind a place, or from the very beginning, and what it sampled.

        Returns the place of the last token; None: there is no room for them, and nothing was added.
        """
        if self.room(asked, place) < len(sampled.token_ids):
            return None
        place, known = self.walk(asked, place)
        for added in (asked[known:], sampled):
            first = len(self)
            extend(self.response, added, place)
            for new, token in enumerate(self.response.token_ids[first:], first):
                self._next.setdefault((place, token), new)
                place = new
        self.routes.add(sampled.routes, place, self.response.predecessors or ())
        return place


SEED_BITS = 30  # as the seeds of groups have
# Calls of an episode that may be under way at the same time.
MOST_AT_ONCE = 16
# Calls of an episode where `max_calls` sets no limit: an agent that begins anew with each never runs out of room.
MOST_CALLS = 1000
# A character may be cut into so many tokens, and is only there with the last of them.
_CHARACTER_TOKENS = 8


def derived_seed(name: bytes) -> int:
    """Return a seed that depends on the name alone."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> (64 - SEED_BITS)


@dataclass(eq=False)
class Call:
    """A call of the policy.

    Attributes:
        parent: the call whose tokens the prompt begins with.
        first: the call that this one goes back to.
        response: what it sampled; None: it has not ended, or was aborted.
        capped: whether the client asked for fewer tokens than there was room for.
        place: of its last token in the tree; None: it has not ended, or found no room there.
        token_ids: what it saw and sampled, once it has ended.
        text: of these, once it was asked for.
    """

    prompt_ids: list[int]
    parent: Call | None = None
    response: Response | None = None
    capped: bool = False
    place: int | None = None
    agent_name: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None

    def __post_init__(self) -> None:
        self.first: Call = self if self.parent is None else self.parent.first

    @property
    def sampled(self) -> list[int]:
        """The tokens that it sampled."""
        return [] if self.response is None else self.response.token_ids


@dataclass
class Recording:
    """The calls of one episode.

    Attributes:
        sampling: the run's; `max_tokens` bounds all that stands behind a first prompt, `seed` is the episode's.
        max_episode_len: most different tokens of all calls.
        max_calls: how many there may be; None: `MOST_CALLS`.
        calls: those that have ended, in this order.
        tree: their tokens; None: none has ended.
    """

    sampling: SamplingSettings
    tokenizer: Any
    max_model_len: int
    max_episode_len: int
    max_calls: int | None = None
    calls: list[Call] = field(default_factory=list)
    tree: TokenTree | None = None
    _num_begun: int = 0
    _num_running: int = 0
    _seen: Counter[bytes] = field(default_factory=Counter)
    _longest_first: list[Call] = field(default_factory=list)

    def begin(
        self, rendered: Sequence[int], *, is_chat: bool, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> tuple[Call, SamplingSettings]:
        """A new call, and how it is sampled.

        Args:
            rendered: the prompt as the chat template or the client says it.
            is_chat: whether a chat template has rendered it, so that tokens of earlier calls may stand in it.
            stop: texts that end the response, besides the run's.
        """
        most = MOST_CALLS if self.max_calls is None else self.max_calls
        if self._num_begun >= most:
            raise RequestRefused(f"the episode has had its {most} calls (rollout.agent.max_assistant_turns)")
        if self._num_running >= MOST_AT_ONCE:
            raise RequestRefused(f"{MOST_AT_ONCE} calls of the episode are under way already")
        call = self._exact(list(rendered)) if is_chat else Call(list(rendered), self._prefix(list(rendered)))
        tree, (place, asked) = self._tree(call), _behind(call)
        behind = len(call.prompt_ids) - len(call.first.prompt_ids)
        row_room = min(self.sampling.max_tokens - behind, tree.room(asked, place))
        room = min(self.max_model_len - len(call.prompt_ids), row_room)
        if room < 1:
            raise RequestRefused(
                f"context_length_exceeded: a prompt of {len(call.prompt_ids)} tokens, {behind} of them behind the "
                f"episode's first prompt, leaves no room (data.max_response_length={self.sampling.max_tokens}, "
                f"rollout.max_model_len={self.max_model_len}, and actor.ppo_max_token_len_per_gpu: at most "
                f"{self.max_episode_len} different tokens of all calls)"
            )
        self._num_begun, self._num_running = self._num_begun + 1, self._num_running + 1
        limit = min(room, max_tokens or room)
        call.capped = limit < room
        stops = tuple(dict.fromkeys((*stop, *self.sampling.stop)))
        known = tree.known_routes(asked, place, len(call.prompt_ids))
        changes: dict[str, Any] = {"seed": self._seed(call.prompt_ids), "stop": stops, "routes_from": known}
        return call, replace(self.sampling, n=1, max_tokens=limit, min_tokens=0, **changes)

    def end(self, call: Call, response: Response | None) -> None:
        """A call has ended; without a response it was aborted, and is forgotten."""
        self._num_running -= 1
        if response is None:
            return
        call.response = response
        call.token_ids = call.prompt_ids + response.token_ids
        self.calls.append(call)
        insort(self._longest_first, call, key=lambda call: -len(call.token_ids))
        self.tree, (place, asked) = self._tree(call), _behind(call)
        call.place = self.tree.add(asked, response, place)  # there is no room if others sampled at the same time

    @property
    def delivered(self) -> float:
        """The share of all sampled tokens that train; 1 if none was sampled."""
        total = sum(len(call.sampled) for call in self.calls)
        return sum(len(call.sampled) for call in self.calls if call.place is not None) / total if total else 1.0

    def _tree(self, call: Call) -> TokenTree:
        """The tree, which begins with the first call that ends."""
        return TokenTree(call.prompt_ids, self.max_episode_len) if self.tree is None else self.tree

    def _exact(self, rendered: list[int]) -> Call:
        if (parent := self._prefix(rendered)) is not None:
            return Call(rendered, parent)
        text = self._decode(rendered)
        for call in self._longest_first:
            call.text = self._decode(call.token_ids) if call.text is None else call.text
            if text.startswith(call.text) and (cut := _cut_behind(rendered, call.text, self._decode)) is not None:
                return Call(call.token_ids + rendered[cut:], call)
        return Call(rendered)

    def _prefix(self, prompt: list[int]) -> Call | None:
        """The longest call whose tokens the prompt begins with."""
        return next((call for call in self._longest_first if prompt[: len(call.token_ids)] == call.token_ids), None)

    def _seed(self, prompt_ids: list[int]) -> int | None:
        """Return a seed by the prompt and how often it was asked, whatever the order of parallel calls."""
        if self.sampling.seed is None:
            return None
        key = hashlib.blake2b(repr((self.sampling.seed, prompt_ids)).encode(), digest_size=8).digest()
        self._seen[key] += 1
        return derived_seed(key + str(self._seen[key]).encode())

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _behind(call: Call) -> tuple[int | None, list[int]]:
    """Where in the tree a call goes on, and what it was asked behind that place."""
    if (parent := call.parent) is None or parent.place is None:
        return None, call.prompt_ids
    return parent.place, call.prompt_ids[len(parent.token_ids) :]


def _cut_behind(ids: list[int], text: str, decode: Any) -> int | None:
    """Return how many of `ids` say `text`; None: they say something else, or it ends within a token."""
    low = bisect_left(range(len(ids)), len(text), key=lambda end: len(decode(ids[:end])))
    ends = range(low, min(low + _CHARACTER_TOKENS, len(ids)) + 1)
    return next((end for end in ends if decode(ids[:end]) == text), None)
