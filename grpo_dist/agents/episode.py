"""An episode: the response to one prompt as it grows, turn by turn.

Its tokens are of two kinds. What the policy sampled trains: mask 1, with the sampler's log-probs and weight versions.
What was put in, a tool's or an environment's text, is read by the policy and does not train: mask 0, log-prob 0, weight
version -1, since no weights sampled it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.registry import described

# (prompt, sampling) -> the sampled continuation; None: it was aborted.
Sample = Callable[[list[int], SamplingSettings], Awaitable[Response | None]]

NO_VERSION = -1
_SEED_BITS = 30  # as the seeds of groups have


@dataclass(frozen=True)
class Row:
    """The row of the data that an episode starts from: the prompt, as tokens and messages, and what belongs to it.

    The ground truth is left out: whatever an environment must know goes into `extra_info`.
    """

    uid: str
    prompt_ids: Sequence[int]
    messages: Sequence[Mapping[str, Any]] = ()
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One turn of an episode, sampled by the policy.

    Attributes:
        text: decoded, without special tokens.
        token_ids: the tokens; the last one may hold text beyond the text that stopped it.
        stop: the text that stopped it; None: it ended with the end-of-sequence token, or was cut short.
        truncated: cut short at the turn's longest length, or no room was left for it.
    """

    text: str
    token_ids: tuple[int, ...]
    stop: str | None
    truncated: bool


class Episode:
    """One episode; what an `AgentLoop` works with.

    Args:
        row: what it starts from.
        sampling: how to sample; `max_tokens` bounds the whole response, `seed` is that of the row's first episode.
        index: which of the row's n episodes this is.
        tokenizer: the model's.
        max_model_len: most tokens of prompt and response.

    Attributes:
        row: what it starts from.
        index: which of the row's n episodes this is.
        tokenizer: the model's.
        token_ids: the response so far, sampled and put in.
        num_turns: how often the policy was sampled.
        truncated: whether the response was cut short, or ran out of room; a loop may set it too.
    """

    def __init__(
        self, row: Row, sampling: SamplingSettings, *, index: int = 0, tokenizer: Any, max_model_len: int
    ) -> None:
        self.row, self.index, self.tokenizer = row, index, tokenizer
        self.token_ids: list[int] = []
        self.num_turns, self.truncated = 0, False
        self._sampling = sampling
        self._longest = min(sampling.max_tokens, max_model_len - len(row.prompt_ids))
        self._mask: list[int] = []
        self._log_probs: list[float] = []
        self._weight_versions: list[int] = []
        self._sample: Sample | None = None
        self._busy = False

    def connect(self, sample: Sample) -> None:
        """Set the function that samples; the runner calls this."""
        self._sample = sample

    @property
    def room(self) -> int:
        """Tokens that are left of data.max_response_length and the engine's longest sequence."""
        return self._longest - len(self.token_ids)

    @property
    def text(self) -> str:
        """The response so far, sampled and put in, without special tokens."""
        return self._decode(self.token_ids)

    async def generate(self, max_tokens: int | None = None, stop: str | Sequence[str] = ()) -> Turn:
        """Have the policy go on from here.

        Args:
            max_tokens: most tokens of the turn; None: all there is room for.
            stop: texts that end the turn, besides `rollout.stop`; they belong to it.

        Returns:
            The turn. With no room left it is empty and `truncated`, and so is the episode.

        Raises:
            RuntimeError: another turn of the episode is being sampled.
        """
        if self._busy or self._sample is None:
            raise RuntimeError("episode.generate: a turn of this episode is being sampled; await it first")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"episode.generate(max_tokens={max_tokens}): must be 1 or more")
        if self.room < 1:
            self.truncated = True
            await asyncio.sleep(0)  # so that a loop that never ends can be stopped
            return Turn("", (), None, True)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        limit = min(self.room, max_tokens or self.room)
        sampling = self._turn_sampling(limit, stops)
        self._busy = True
        try:
            response = await self._sample([*self.row.prompt_ids, *self.token_ids], sampling)
        finally:
            self._busy = False
        if response is None:
            raise asyncio.CancelledError("the group was aborted")
        self.num_turns += 1
        self.truncated = self.truncated or (response.truncated and limit == self.room)
        self._extend(response.token_ids, 1, response.log_probs, response.weight_versions)
        text = self._decode(response.token_ids)
        return Turn(text, tuple(response.token_ids), response.stop, response.truncated)

    def append(self, text: str) -> None:
        """Put in text that does not train. Special tokens may be written out, such as those of the chat template.

        Raises:
            TypeError: it is no text.
        """
        if not isinstance(text, str):
            raise TypeError(f"episode.append(text): must be text, is {described(text)}")
        self.append_tokens(self.tokenizer.encode(text, add_special_tokens=False))

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Put in tokens that do not train; where they do not fit, they are cut and the episode is `truncated`.

        Raises:
            ValueError: an id is outside the tokenizer's vocabulary.
        """
        ids = [int(token) for token in token_ids]
        if ids and not 0 <= min(ids) <= max(ids) < len(self.tokenizer):
            raise ValueError(
                f"episode.append_tokens: ids {min(ids)}..{max(ids)} leave the vocabulary of {len(self.tokenizer)}"
            )
        self.truncated = self.truncated or len(ids) > self.room
        ids = ids[: max(self.room, 0)]
        self._extend(ids, 0, [0.0] * len(ids), [NO_VERSION] * len(ids))

    def response(self) -> Response:
        """The whole response.

        Raises:
            RuntimeError: nothing was sampled, so there is nothing to train.
        """
        if not self.num_turns:
            raise RuntimeError(
                f"the episode ended without a turn, with {len(self.token_ids)} tokens put in and room for {self.room} "
                "more (data.max_response_length): await episode.generate() at least once"
            )
        return Response(
            self.token_ids,
            self._log_probs,
            self.truncated,
            self._weight_versions,
            mask=self._mask,
            num_turns=self.num_turns,
        )

    def _turn_sampling(self, limit: int, stop: tuple[str, ...]) -> SamplingSettings:
        """The first turn has the seed that the response would have in a group of one request; later ones follow it."""
        whole = self._sampling
        seed = None if whole.seed is None else whole.seed + self.index
        if seed is not None and self.num_turns:
            digest = hashlib.blake2b(f"{seed}/{self.num_turns}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "big") >> (64 - _SEED_BITS)
        least = min(max(whole.min_tokens - len(self.token_ids), 0), limit)
        stops = tuple(dict.fromkeys((*stop, *whole.stop)))
        return replace(whole, n=1, max_tokens=limit, min_tokens=least, seed=seed, stop=stops)

    def _extend(self, token_ids: Sequence[int], mask: int, log_probs: Sequence[float], versions: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self._mask.extend([mask] * len(token_ids))
        self._log_probs.extend(log_probs)
        self._weight_versions.extend(versions)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)
