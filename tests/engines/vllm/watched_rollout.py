"""A rollout worker that can be met at work, however late the test is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import ray

from grpo_dist.engines.base import DraftCounts
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm import exact_drafts
from grpo_dist.engines.vllm.draft_length import DraftLength
from grpo_dist.roles.rollout import RolloutWorker


class WatchedRolloutWorker(RolloutWorker):
    """Waits by itself until so many sequences are being sampled, and then does what it was asked for."""

    async def load_weights_when_running(self, count: int, buckets: Sequence[ray.ObjectRef], version: int) -> int:
        await self._running(count)
        return await self.load_weights(buckets, version)

    async def abort_when_running(self, count: int, uids: Sequence[str]) -> None:
        await self._running(count)
        await self.abort(uids)

    async def start_drafting(self, settings: EngineSettings) -> None:
        """Start an engine that always drafts as much as it may, however long its steps take."""
        exact_drafts.BOUNDS = (0.0,)
        DraftLength.seconds_to_look = lambda self, sequences: math.inf  # type: ignore[method-assign]
        DraftLength.choose = lambda self, chances: [*map(len, chances)]  # type: ignore[method-assign]
        await self.start(settings)

    async def draft_counts(self) -> DraftCounts:
        return await self.engine.draft_counts()  # type: ignore[attr-defined,no-any-return]

    async def _running(self, count: int) -> None:
        while self.engine.load.running < count:
            await asyncio.sleep(0)
