"""The rollout worker of a rehearsal: from a step on half of a group's responses are the row's own answer.

So rewards above the floor, parsers and tools are met, which random weights never write. The log-probs of these tokens
are the engine's.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from grpo_dist.workers.rollout import RolloutWorker

# Beside the policy: the first step that takes them, the most tokens of a sampled turn, since random weights end
# none, and by the row's number the token ids of replies, turn by turn.
REPLIES = "replies.json"
_UID = re.compile(r"step(\d+)-prompt(\d+)")


class RehearsedRollout(RolloutWorker):
    """Samples, and gives the rows' own answers."""

    def make_engine(self, settings: EngineSettings) -> Any:
        """See `RolloutWorker.make_engine`."""
        engine: Any = super().make_engine(settings)
        if hasattr(engine, "score"):
            given = json.loads(Path(settings.model.path).with_name(REPLIES).read_text())
            engine.generate = Replying(engine, *given).generate
        return engine


class Replying:
    """An engine's `generate`, with replies that are given by the row's number from step `first` on."""

    def __init__(self, engine: Any, first: int, most: int, replies: Mapping[str, list[list[int]]]) -> None:
        self._sample, self._score, self._first, self._replies = engine.generate, engine.score, first, replies
        self._most = most
        self._asked: Counter[str] = Counter()

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingSettings, request_id: str | None = None, **seen: Any
    ) -> list[Response] | None:
        """See `RolloutEngine.generate`."""
        step, row = match.groups() if (match := _UID.match(request_id or "")) else ("0", "")
        replies = self._replies.get(row, []) if int(step) >= self._first else []
        asked = f" {' '.join(map(str, prompt))} "
        turn = len([reply for reply in replies if f" {' '.join(map(str, reply))} " in asked])
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, self._most))
        own = turn > 0 or self._asked[str(request_id)] % 2 == 0
        self._asked[str(request_id)] += not turn
        if not own or turn >= len(replies):
            return await self._sample(prompt, sampling, request_id, **seen)
        response = await self._score(prompt, replies[turn], **seen)
        if sampling.n == 1:
            return [response]
        sampled = await self._sample(prompt, sampling, request_id, **seen)
        return sampled and [response if i % 2 == 0 else each for i, each in enumerate(sampled)]
