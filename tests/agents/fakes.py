"""A tokenizer of one token per character, and an engine that writes what it was told to."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings

END = 0


async def until(condition: Callable[[], Any]) -> None:
    """Wait for it, a minute at most."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


class Characters:
    """Token id = code point; 0 ends."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], **options: object) -> str:
        return "".join(chr(token) for token in token_ids if token != END)

    def __len__(self) -> int:
        return 128


class Writer:
    """Continues any prompt with the next of `turns`, up to a stop text or the longest length; then it ends.

    Every token has log-prob -0.5; `version` grows by one a turn.
    """

    def __init__(self, *turns: str) -> None:
        self.turns, self.version = list(turns), 7
        self.asked: list[tuple[list[int], SamplingSettings]] = []

    async def sample(self, prompt: list[int], sampling: SamplingSettings) -> Response:
        self.asked.append((list(prompt), sampling))
        await asyncio.sleep(0)
        text, stop = self.turns.pop(0) if self.turns else "", None
        for candidate in sampling.stop:
            head, found, _ = text.partition(candidate)
            if found:
                text, stop = head + found, candidate
        ids = [ord(character) for character in text] + ([] if stop else [END])
        cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        self.version += 1
        return Response(ids, [-0.5] * len(ids), cut, [self.version] * len(ids), stop=None if cut else stop)

    async def generate(self, prompt: Sequence[int], sampling: SamplingSettings, uid: Any = None) -> list[Response]:
        """As the engine's."""
        return [await self.sample(list(prompt), sampling)]
